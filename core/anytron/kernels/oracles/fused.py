"""The fused kernels from their formulas, in float64; the signatures are those of :mod:`anytron.kernels.fused`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Divide ``x`` ``[..., N]`` by the root of its mean square plus ``eps``, and multiply with the factor ``[N]``."""
    x, factor = x.double(), weight.double() + float(zero_centered)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * factor


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Subtract the mean, divide by the root of variance plus ``eps``, multiply with the factor and add the bias."""
    x, factor = x.double(), weight.double() + float(zero_centered)
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * factor
    return scaled if bias is None else scaled + bias.double()


def reference_swiglu(x: Tensor) -> Tensor:
    """``first / (1 + exp(-first)) * second`` of the halves of the last dimension."""
    size = x.shape[-1] // 2
    first, second = x[..., :size].double(), x[..., size:].double()
    return first / (1 + (-first).exp()) * second


def reference_rope(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """Turn pairs of the first R entries of a head as complex numbers are turned; the other entries pass.

    Args:
        x: ``[..., D]``.
        freqs: Angles, broadcastable to ``[..., R]``, each of them twice.
        interleaved: Pairs are neighbours instead of i and i + R/2.
    """
    size = freqs.shape[-1]
    first, second = (0, 1) if interleaved else (0, size // 2)
    step, count = (2, size) if interleaved else (1, size // 2)
    reals, imaginaries = x[..., first : first + count : step].double(), x[..., second : second + count : step].double()
    angles = freqs[..., first : first + count : step].double()
    turned = reals * angles.cos() - imaginaries * angles.sin(), reals * angles.sin() + imaginaries * angles.cos()
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined, x[..., size:].double()], -1)


def reference_grouped_mm(x: Tensor, weights: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """Multiply each row of ``x`` ``[T, K]`` with the matrix ``[N, K]`` of its group."""
    groups = [group for group, rows in enumerate(splits) for _ in range(rows)]
    rows = [weights[group].double() @ row.double() for group, row in zip(groups, x, strict=True)]
    nothing = x[:0].double() @ weights[0].double().T
    return torch.cat([nothing, *(row[None] for row in rows)])


def reference_adam(
    param: Tensor,
    grads: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of Adam per gradient, from moments of zero; give the parameter and both moments, float64."""
    value = param.double()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for step, given in enumerate(grads, start=1):
        grad = given.double() if decoupled else given.double() + weight_decay * value
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad.pow(2)
        corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        if decoupled:
            value = value - lr * weight_decay * value
        value = value - lr * (first / corrections[0]) / ((second / corrections[1]).sqrt() + eps)
    return value, first, second
