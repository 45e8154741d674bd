"""The fused kernels and the log-probs from their formulas, in float64.

Signatures are like those of :mod:`anytron.kernels.fused`. Recurrences are computed one token after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Divide ``x`` ``[..., N]`` by the root of its mean square plus ``eps``; multiply with (1 +) ``weight`` ``[N]``."""
    x, factor = x.double(), weight.double() + float(zero_centered)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * factor


def reference_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Subtract the mean, divide by the root of variance plus ``eps``, multiply with (1 +) ``weight``, add ``bias``."""
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
    """Rotate pairs of the first R entries of a head, as complex numbers; the other entries are unchanged.

    Args:
        x: ``[..., D]``.
        freqs: Angles in radians, broadcastable to ``[..., R]``; each angle occurs twice, once per entry of its pair.
        interleaved: Whether pairs are neighbours instead of the entries i and i + R/2.
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
    """Take one step of Adam per gradient, from moments of zero; return the parameter and both moments, float64."""
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


def reference_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, lengths: Sequence[int], scale: float
) -> Tensor:
    """Run the recurrence of arXiv:2412.06464 (equation 10), differentiable.

    Args:
        query: ``[T, H, K]``, sequences one after the other.
        key: ``[T, H, K]``.
        value: ``[T, H, V]``.
        g: ``[T, H]``, logarithm of the decay.
        beta: ``[T, H]``.
        lengths: Tokens of each sequence; remaining tokens belong to no sequence.
        scale: Factor of the output.

    Returns:
        float64 ``[T, H, V]``; zero for tokens of no sequence.
    """
    query, key, value, g, beta = (operand.double() for operand in (query, key, value, g, beta))
    outputs: list[Tensor] = []
    for length in lengths:
        state = query.new_zeros(query.shape[1], query.shape[2], value.shape[2])
        for token in range(len(outputs), len(outputs) + length):
            state = state * g[token].exp()[:, None, None]
            known = torch.einsum("hk,hkv->hv", key[token], state)
            update = beta[token][:, None] * (value[token] - known)
            state = state + torch.einsum("hk,hv->hkv", key[token], update)
            outputs.append(scale * torch.einsum("hk,hkv->hv", query[token], state))
    nothing = value.new_zeros(value.shape[1:])
    return torch.stack(outputs + [nothing] * (query.shape[0] - len(outputs)))


def reference_state_space_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, *, lengths: Sequence[int]
) -> Tensor:
    """Run the recurrence of Mamba-2 (arXiv:2405.21060, equations 1 and 2), differentiable.

    Args:
        x: ``[T, H, P]``, sequences one after the other.
        dt: ``[T, H]``.
        a: ``[H]``.
        b: ``[T, G, N]``, head h has the group ``h // (H / G)``.
        c: ``[T, G, N]``.
        d: ``[H]``.
        lengths: Tokens of each sequence; remaining tokens belong to no sequence.

    Returns:
        float64 ``[T, H, P]``; zero for tokens of no sequence.
    """
    x, dt, a, d = (operand.double() for operand in (x, dt, a, d))
    b, c = (operand.double().repeat_interleave(x.shape[1] // operand.shape[1], dim=1) for operand in (b, c))
    outputs: list[Tensor] = []
    for length in lengths:
        state = x.new_zeros(x.shape[1], b.shape[2], x.shape[2])
        for token in range(len(outputs), len(outputs) + length):
            step = dt[token][:, None]
            state = (step * a[:, None]).exp()[..., None] * state
            state = state + torch.einsum("hn,hp->hnp", b[token], step * x[token])
            outputs.append(torch.einsum("hn,hnp->hp", c[token], state) + d[:, None] * x[token])
    nothing = x.new_zeros(x.shape[1:])
    return torch.stack(outputs + [nothing] * (x.shape[0] - len(outputs)))


def reference_causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, lengths: Sequence[int], silu: bool
) -> Tensor:
    """Convolve by the sum over taps, differentiable.

    Args:
        x: ``[T, D]``, sequences one after the other.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        lengths: Tokens of each sequence; their sum is T.
        silu: Apply SiLU.

    Returns:
        float64 ``[T, D]``.
    """
    x, weight = x.double(), weight.double()
    width = weight.shape[1]
    rows: list[Tensor] = []
    for length in lengths:
        start = len(rows)
        for token in range(length):
            taps = range(min(width, token + 1))
            row = sum((weight[:, width - 1 - back] * x[start + token - back] for back in taps), x.new_zeros(()))
            rows.append(row if bias is None else row + bias.double())
    y = torch.stack(rows)
    return y * y.sigmoid() if silu else y


def reference_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, entries: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute all logits of the vocabulary, and return the label's log-prob and the entropy of each token.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, V at least ``entries``: the rows beyond are padding.
        labels: int64 ``[N]``; negative = ignored.
        entries: Entries of the vocabulary.
        temperature: Logits are divided by it.

    Returns:
        Log-probs and entropies, float64 ``[N]``, differentiable; 0 where the label is ignored.
    """
    every = (hidden.double() @ weight[:entries].double().T / temperature).log_softmax(-1)
    real = (labels >= 0).double()
    chosen = every.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return chosen * real, -(every.exp() * every).sum(-1) * real
