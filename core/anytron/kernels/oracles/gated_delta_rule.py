"""The gated delta rule and its convolution by their definitions: one token after the other, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        lengths: Tokens of each sequence; what is left over belongs to none.
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
