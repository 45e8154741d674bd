"""Mixture-of-experts routers of megatron-core without Transformer Engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "megatron.core.transformer.moe.moe_utils"
NAME = "te_general_gemm"


def define_missing_gemm() -> Callable[[], None]:
    """Say that there is no such function, as Megatron's own code expects; return the undo function."""
    module = importlib.import_module(MODULE)
    setattr(module, NAME, None)

    def undo() -> None:
        delattr(module, NAME)

    return undo
