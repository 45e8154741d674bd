"""Split the fused projection into queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SplitAlongDim(torch.autograd.Function):
    """``torch.split`` with contiguous parts; Megatron calls ``apply(x, dim, sizes)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(part.contiguous() for part in torch.split(x, sizes, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(grads, ctx.dim), None, None
