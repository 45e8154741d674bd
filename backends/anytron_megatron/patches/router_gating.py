"""Let mixture-of-experts routers of megatron-core work without Transformer Engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from anytron.device.patches import Installed

if TYPE_CHECKING:
    from anytron.device.hooks.types import PatchContext

MODULE = "megatron.core.transformer.moe.moe_utils"
NAME = "te_general_gemm"


def define_missing_gemm(_context: PatchContext) -> Installed:
    """Define the function's name as None, as Megatron's code expects where there is no such function."""
    module = importlib.import_module(MODULE)
    setattr(module, NAME, None)
    return Installed(lambda: delattr(module, NAME))
