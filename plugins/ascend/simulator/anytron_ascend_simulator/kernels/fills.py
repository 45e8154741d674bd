"""Primitives that torch_npu's C++ calls directly, past the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _pad(source: Tensor, padding: list[int], value: Any, target: Tensor) -> None:
    target.copy_(torch.nn.functional.pad(source, padding, value=value))
