"""Basalt's fused kernels: the RMS norm, with its own backward pass, and SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from anytron.kernels import KernelName

if TYPE_CHECKING:
    from collections.abc import Callable


class _RMSNorm(torch.autograd.Function):
    """``x / rms(x) * factor`` over the last dimension, in float32 inside. Keeps one number per row.

    With ``r = 1 / sqrt(mean(x^2) + eps)`` and the gradient g of the answer, divided among factor and row::

        d factor = sum over rows of g * x * r
        d x      = r * (g * factor - x * r^2 * mean(g * factor * x))
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, factor, inverse)
        return (wide * inverse * factor.float()).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, factor, inverse = ctx.saved_tensors
        normal, grad = x.float() * inverse, grad.float()
        grad_factor = (grad * normal).flatten(0, -2).sum(0)
        scaled = grad * factor.float()
        grad_x = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_factor.to(factor.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Normalise the rows ``[..., N]`` of ``x``; the factor is ``weight`` ``[N]``, or ``1 + weight`` if zero-centred."""
    factor = 1.0 + weight.float() if zero_centered else weight
    normal: Tensor = _RMSNorm.apply(x, factor, eps)  # type: ignore[no-untyped-call]
    return normal


def swiglu(x: Tensor) -> Tensor:
    """Gate the second half of the last dimension by SiLU of the first: ``[..., 2 N]`` -> ``[..., N]``."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


KERNELS: dict[KernelName, Callable[..., Any]] = {KernelName.RMS_NORM: rms_norm, KernelName.SWIGLU: swiglu}
"""What Basalt has; for every other name the hook answers None."""
