"""Operators that torch_npu has for the device and torch has not for the host, written out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.differentiate import gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def _matmul_backward(
    grad: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    found = gradients(torch.matmul, (self, other), grad)
    kept = (f.to(x.dtype) if wanted else None for f, x, wanted in zip(found, (self, other), mask, strict=True))
    return next(kept), next(kept)


def _mm_as(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.matmul(self.to(out_dtype), mat2.to(out_dtype))


def _addmm_as(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return beta * self.to(out_dtype) + alpha * _mm_as(mat1, mat2, out_dtype)


def _masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask * scale


def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    # The device counts integers too; the host does not.
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


FORMULAS: dict[str, Callable[..., object]] = {
    "aten.matmul_backward.default": _matmul_backward,
    "aten.mm.dtype": _mm_as,
    "aten.bmm.dtype": _mm_as,
    "aten.addmm.dtype": _addmm_as,
    "aten.baddbmm.dtype": _addmm_as,
    "aten._masked_scale.default": _masked_scale,
    "aten.histc.default": _histc,
}
"""By the operator's name; the signatures are aten's."""
