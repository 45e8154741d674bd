"""Rotary position embeddings (Su et al., arXiv:2104.09864): the neutral default of the fused kernel ``rope``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``R`` entries of the last dimension; the others pass.

    Args:
        x: ``[..., D]``: queries, or keys, with their heads in the dimension before the last.
        freqs: Angles in radians, broadcastable to ``[..., R]``, R <= D; each angle stands in it
            twice: halves one after the other, or neighbours if ``interleaved``.
        interleaved: Pairs are neighbours (GPT-J) instead of i and i + R/2 (GPT-NeoX, Hugging Face).
    """
    # Cast before multiplying, as Hugging Face and Megatron do.
    cos, sin = freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)
    turned: Tensor = _Rotation.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back. Angles have none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        turned = _times(x, cos)
        first, second = _pairs(turned, cos.shape[-1], interleaved)
        x_first, x_second = _pairs(x, cos.shape[-1], interleaved)
        sin_first, sin_second = _pairs(sin, cos.shape[-1], interleaved)
        # Not addcmul, which rounds once: the numbers are Hugging Face's, to the bit.
        first.sub_(x_second * sin_first)
        second.add_(x_first * sin_second)
        return turned

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        back = _times(grad, cos)
        first, second = _pairs(back, cos.shape[-1], ctx.interleaved)
        grad_first, grad_second = _pairs(grad, cos.shape[-1], ctx.interleaved)
        sin_first, sin_second = _pairs(sin, cos.shape[-1], ctx.interleaved)
        first.addcmul_(grad_second, sin_second)
        second.addcmul_(grad_first, sin_first, value=-1)
        return back, None, None, None


def _times(x: Tensor, cos: Tensor) -> Tensor:
    """``x * cos`` in the entries that turn, and x in the others."""
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return x * cos
    product = x.clone()
    product[..., :size].mul_(cos)
    return product


def _pairs(x: Tensor, size: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second of each pair among the first ``size`` entries."""
    turned = x[..., :size]
    if interleaved:
        return turned[..., 0::2], turned[..., 1::2]
    first, second = turned.chunk(2, dim=-1)
    return first, second
