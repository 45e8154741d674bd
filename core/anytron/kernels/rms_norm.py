"""Root mean square normalization: the neutral default of the fused kernel ``rms_norm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Normalise by the root mean square over the last dimension, in float32.

    The order of operations is Hugging Face's, so that logits are equal: cast to the input's type,
    then the weight (``modeling_llama.LlamaRMSNorm``); with a zero-centred weight first ``1 + weight``
    in float32, then the cast (``modeling_qwen3_next.Qwen3NextRMSNorm``).

    Args:
        x: ``[..., N]``: hidden states, or heads of queries and keys, where N is the size of a head.
        weight: ``[N]``.
        eps: Added to the mean square.
        zero_centered: The factor is ``1 + weight``.
    """
    if zero_centered:
        return _scaled(x.float(), 1.0 + weight.float(), eps).to(x.dtype)
    if x.dtype == weight.dtype == torch.float32:
        return _scaled(x, weight, eps)
    return weight * _scaled(x.float(), None, eps).to(x.dtype)


def _scaled(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    scaled: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return scaled


class _RMSNorm(torch.autograd.Function):
    """``x * rsqrt(mean(x ** 2) + eps) * weight``, with a gradient in a third of the passes that autograd makes.

    Of the gradient g of the result, with r the reciprocal root and N numbers in a row:
    ``dx = g * weight * r - x * r ** 3 * sum(g * weight * x) / N``, ``dweight = sum over rows(g * x * r)``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        reciprocal = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, reciprocal)
        normed = x * reciprocal
        return normed if weight is None else normed * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, reciprocal = ctx.saved_tensors
        products = (grad * x).reshape(-1, x.shape[-1])
        if weight is None:
            sums, of_weight, of_x = products.sum(-1), None, grad * reciprocal
        else:
            sums = products @ weight
            of_weight = reciprocal.flatten() @ products
            of_x = (grad * weight).mul_(reciprocal)
        factor = reciprocal.pow(3).mul_(sums.view_as(reciprocal)).div_(-x.shape[-1])
        return of_x.addcmul_(x, factor), of_weight, None
