"""The default kernels of the hook ``fused_kernel``.

A plugin's kernel has the same signature as the default kernel with the same name.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from anytron.kernels import invariant
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.gated_delta_rule import gated_delta_rule
from anytron.kernels.state_space_scan import state_space_scan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


__all__ = [
    "adam",
    "causal_conv1d",
    "default_kernel",
    "gated_delta_rule",
    "grouped_mm",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "state_space_scan",
    "swiglu",
]


def default_kernel(name: KernelName, spec: KernelSpec) -> Callable[..., Any]:
    """Return the pure torch kernel for ``name``: with ``spec.invariant``, one that multiplies in tiles of one shape."""
    return _INVARIANT.get(name, _KERNELS[name]) if spec.invariant else _KERNELS[name]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows ``x`` ``[..., K]`` by a weight ``[N, K]`` and add a bias ``[N]``, or None: ``[..., N]``."""
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Normalise by the root mean square over the last dimension, in float32.

    The order of operations is Hugging Face's, so that logits are equal: the normalised input is cast to the input's
    type and then multiplied by the weight (``modeling_llama.LlamaRMSNorm``); with a zero-centred weight, it is first
    multiplied by ``1 + weight`` in float32 and then cast (``modeling_qwen3_next.Qwen3NextRMSNorm``).

    Args:
        x: ``[..., N]``: hidden states, or heads of queries and keys, where N is the size of a head.
        weight: ``[N]``.
        eps: Added to the mean square.
        zero_centered: Whether the factor is ``1 + weight`` instead of ``weight``.
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Normalise by mean and standard deviation over the last dimension of ``x`` ``[..., N]``.

    The factor is ``weight``, or ``1 + weight`` if ``zero_centered``; ``weight`` and ``bias`` are ``[N]``. The
    arithmetic is float32 or wider: on a CPU torch adds up the gradients of ``weight`` and ``bias`` in their own dtype,
    and in bfloat16 the sum over thousands of rows stops at some hundreds.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    factor = (1 + weight if zero_centered else weight).to(dtype)
    normed = functional.layer_norm(x.to(dtype), (x.shape[-1],), factor, None if bias is None else bias.to(dtype), eps)
    return normed.to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """Gate the second half of the last dimension by SiLU of the first: ``[..., 2 N]`` -> ``[..., N]``.

    The order of the halves is Megatron's (``megatron/core/fusions/fused_bias_swiglu.py``). Only ``x`` is kept for the
    backward pass.
    """
    gated: Tensor = _SwiGLU.apply(x, functional.silu)  # type: ignore[no-untyped-call]
    return gated


def _invariant_swiglu(x: Tensor) -> Tensor:
    gated: Tensor = _SwiGLU.apply(x, invariant.silu)  # type: ignore[no-untyped-call]
    return gated


class _SwiGLU(torch.autograd.Function):
    """The same numbers as by autograd, which would keep three tensors and join the halves' gradients by a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, silu: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        of_gate, of_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return grad_x, None


def rope(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first ``R`` entries of the last dimension; the others are returned unchanged.

    Args:
        x: ``[..., D]``: queries, or keys, with their heads in the dimension before the last.
        freqs: Angles in radians, broadcastable to ``[..., R]``, R <= D; each angle occurs twice, at the two entries of
            its pair.
        interleaved: Rotate pairs of neighbours (GPT-J) instead of the entries i and i + R/2 (GPT-NeoX, Hugging Face).
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


def grouped_mm(x: Tensor, weights: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """Multiply each group of consecutive rows with the weight matrix of the group: ``rows @ weight.T``.

    Args:
        x: ``[T, K]``, rows sorted by group.
        weights: One weight ``[N, K]`` for each group.
        splits: Number of rows of each group, which may be 0; the sum is T.

    Returns:
        ``[T, N]``. The weight of a group without rows gets a gradient of zeros, not None.
    """
    parts = torch.split(x, list(splits))
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None) -> Tensor:
    """Convolve each channel with the last ``W`` tokens of its own sequence.

    ``y[t] = sum over j < W of weight[:, W - 1 - j] * x[t - j]``; before a sequence's first token stand zeros. This is
    ``torch.nn.Conv1d`` with one group per channel, padded on the left. It is computed as one product per tap instead of
    a grouped convolution, which is faster on a CPU and handles the ends of packed sequences with one comparison.
    The arithmetic is float32 or wider.

    Args:
        x: ``[B, S, D]``; packed, ``[1, T, D]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        silu: Apply SiLU to the result.
        cu_seqlens: int32 ``[N + 1]`` with a leading 0: tokens of the buffer at which packed sequences start, and the
            end of the last one; tokens after this end form one more sequence. None = each row is a sequence.

    Returns:
        ``[B, S, D]`` in the type of ``x``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, taps = x.to(dtype), weight.to(dtype)
    tokens, width = x.shape[1], taps.shape[1]
    position = None if cu_seqlens is None else _positions(cu_seqlens, tokens)
    y = wide * taps[:, -1]
    for back in range(1, min(width, tokens)):
        earlier = functional.pad(wide, (0, 0, back, 0))[:, :tokens]
        if position is not None:
            # Not a product: a neighbour's NaN times zero is NaN.
            earlier = earlier.masked_fill((position < back)[:, None], 0)
        y = y + earlier * taps[:, -1 - back]
    if bias is not None:
        y = y + bias.to(dtype)
    return (functional.silu(y) if silu else y).to(x.dtype)


def _positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Position of each of ``tokens`` buffer slots in its sequence, int64 ``[T]``."""
    slot = torch.arange(tokens, device=cu_seqlens.device)
    starts = cu_seqlens.long()
    return slot - starts[torch.searchsorted(starts, slot, right=True) - 1]


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """Make one Adam step in place (Kingma and Ba, arXiv:1412.6980; AdamW, arXiv:1711.05101).

    Like FusedAdam of Apex and Transformer Engine, it has one step number for all tensors, moments in float32, and
    arithmetic in float32 whatever the parameters' type.

    Args:
        params: Parameters, updated in place.
        grads: Gradients of the parameters, with the same shapes.
        exp_avgs: First moments, float32, updated in place.
        exp_avg_sqs: Second moments, float32, updated in place.
        step: Number of this step, from 1.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the corrected second moment.
        weight_decay: Factor; 0 = none.
        decoupled: Decay the weights (AdamW) instead of adding them to the gradient (L2).
        bias_correction: Divide the moments by ``1 - beta ** step``.
    """
    values = [param.float() for param in params]
    gradients = [grad.float() for grad in grads]
    if weight_decay and not decoupled:
        gradients = list(torch._foreach_add(gradients, values, alpha=weight_decay))
    torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, math.sqrt(second))
    torch._foreach_add_(denominators, eps)
    if weight_decay and decoupled:
        torch._foreach_mul_(values, 1 - lr * weight_decay)
    torch._foreach_addcdiv_(values, exp_avgs, denominators, -lr / first)
    for param, value in zip(params, values, strict=True):
        if value is not param:
            param.copy_(value)


_KERNELS: Mapping[KernelName, Callable[..., Any]] = MappingProxyType(
    {
        KernelName.LINEAR: linear,
        KernelName.RMS_NORM: rms_norm,
        KernelName.LAYER_NORM: layer_norm,
        KernelName.SWIGLU: swiglu,
        KernelName.ROPE: rope,
        KernelName.GROUPED_MM: grouped_mm,
        KernelName.CAUSAL_CONV1D: causal_conv1d,
        KernelName.GATED_DELTA_RULE: gated_delta_rule,
        KernelName.STATE_SPACE_SCAN: state_space_scan,
        KernelName.ADAM: adam,
    }
)

_INVARIANT: Mapping[KernelName, Callable[..., Any]] = MappingProxyType(
    {
        KernelName.LINEAR: invariant.linear,
        KernelName.GROUPED_MM: invariant.grouped_mm,
        KernelName.SWIGLU: _invariant_swiglu,
    }
)
"""The others compute each row by itself."""
