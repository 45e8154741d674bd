"""The neutral defaults of ``fused_kernel``. Their signatures are the contract of each kernel name."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from anytron.kernels.causal_convolution import causal_conv1d
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.gated_delta_rule import gated_delta_rule
from anytron.kernels.rms_norm import rms_norm
from anytron.kernels.rope import rope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "adam",
    "causal_conv1d",
    "default_kernel",
    "gated_delta_rule",
    "grouped_mm",
    "layer_norm",
    "rms_norm",
    "rope",
    "swiglu",
]


def default_kernel(name: KernelName, spec: KernelSpec) -> Callable[..., Any]:
    """Return the pure torch kernel for ``name``; it depends on nothing in ``spec``."""
    del spec
    return _KERNELS[name]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Normalise by mean and standard deviation over the last dimension of ``x`` ``[..., N]``.

    The factor is ``weight``, or ``1 + weight`` if ``zero_centered``; ``weight`` and ``bias`` are ``[N]``.
    """
    return functional.layer_norm(x, (x.shape[-1],), 1 + weight if zero_centered else weight, bias, eps)


def swiglu(x: Tensor) -> Tensor:
    """Gate the second half of the last dimension by SiLU of the first: ``[..., 2 N]`` -> ``[..., N]``.

    Megatron's order of the halves (``megatron/core/fusions/fused_bias_swiglu.py``). Only ``x`` is kept for the
    backward pass.
    """
    gated: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return gated


class _SwiGLU(torch.autograd.Function):
    """The same numbers as by autograd, which would keep three tensors and join the halves' gradients by a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        of_gate, of_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return grad_x


def grouped_mm(x: Tensor, weights: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """Multiply consecutive rows with one weight matrix each.

    Args:
        x: ``[T, K]``, rows sorted by group.
        weights: For each group ``[N, K]``.
        splits: Rows of each group; may be 0; their sum is T.

    Returns:
        ``[T, N]``. A group without rows gives its weight a zero gradient, not none.
    """
    parts = torch.split(x, list(splits))
    return torch.cat([functional.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


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

    Apex' and Transformer Engine's FusedAdam: one step number for all tensors, moments in float32,
    arithmetic in float32 whatever the parameters' type.

    Args:
        params: Updated in place.
        grads: Their gradients, same shapes.
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
        KernelName.RMS_NORM: rms_norm,
        KernelName.LAYER_NORM: layer_norm,
        KernelName.SWIGLU: swiglu,
        KernelName.ROPE: rope,
        KernelName.GROUPED_MM: grouped_mm,
        KernelName.CAUSAL_CONV1D: causal_conv1d,
        KernelName.GATED_DELTA_RULE: gated_delta_rule,
        KernelName.ADAM: adam,
    }
)
