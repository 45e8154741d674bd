"""The products of experts in one kernel."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from anytron.kernels import fused as neutral

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MAX_GROUPS = 1023
"""``torch/_native/ops/foreach_mm/impl.py``: "bf16 kernel requires group_count < 1024"."""
_ALIGNMENT = 16
"""Bytes; of rows, ``aten/src/ATen/native/GroupedMMUtils.h``."""


class _GroupedProduct(torch.autograd.Function):
    """Products with stacked weights that are not kept: the backward pass stacks them once more.

    torch's own gradient would keep the stack of every layer. On Blackwell it would also give an expert without rows
    what another one has left in the accumulator (pytorch #172439): no group of the weights' gradients is empty here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Sequence[int], *weights: Tensor) -> Tensor:
        ends = _ends(splits, x.device)
        ctx.splits = splits
        ctx.save_for_backward(x, ends, *weights)
        return _product(x, torch.stack(weights).transpose(1, 2), ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        for_x = _product(grad, torch.stack(weights), ends) if ctx.needs_input_grad[0] else None
        for_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            filled = [rows for rows in ctx.splits if rows]
            ends = ends if len(filled) == len(weights) else _ends(filled, x.device)
            products = iter(_product(grad.t(), x, ends))  # [filled groups, N, K]
            for_weights = [
                next(products) if rows else torch.zeros_like(weight)
                for rows, weight in zip(ctx.splits, weights, strict=True)
            ]
        return (for_x, None, *for_weights)


def _ends(splits: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(splits)), dtype=torch.int32, device=device)


def _product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups of rows of ``x`` with a matrix each, or groups of its columns with as many rows of ``y``."""
    public = getattr(functional, "grouped_mm", None)  # from torch 2.10 on
    product: Tensor = torch._grouped_mm(x, y, offs=ends) if public is None else public(x, y, offs=ends)
    return product


def torch_grouped_mm(x: Tensor, weights: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """As :func:`anytron.kernels.fused.grouped_mm`.

    Sizes that its kernel does not take (rows that are no multiple of 16 bytes; no rows at all) are left to the
    reference kernel.
    """
    elements = _ALIGNMENT // x.element_size()
    fits = all(size % elements == 0 for size in weights[0].shape)
    if not fits or not len(x) or len(weights) > MAX_GROUPS or any(weight.dtype != x.dtype for weight in weights):
        return neutral.grouped_mm(x, weights, splits)
    product: Tensor = _GroupedProduct.apply(x.contiguous(), splits, *weights)  # type: ignore[no-untyped-call]
    return product
