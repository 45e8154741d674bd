"""``npu_swiglu`` and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import require
from anytron_ascend_simulator.kernels.differentiate import gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _gated(x: Tensor, dim: int) -> Tensor:
    """``silu(A) * B`` of the halves of ``x`` along ``dim`` (torch_npu's documentation of npu_swiglu)."""
    require(x.size(dim) % 2 == 0, f"dimension {dim} of x {tuple(x.shape)} is not even")
    first, second = x.chunk(2, dim)
    return torch.nn.functional.silu(first) * second


def _swiglu(x: Tensor, dim: int, y: Tensor) -> None:
    y.copy_(_gated(x.float(), dim))


def _swiglu_grad(dy: Tensor, x: Tensor, dim: int, dx: Tensor) -> None:
    dx.copy_(gradients(lambda given: _gated(given, dim), (x,), dy)[0])
