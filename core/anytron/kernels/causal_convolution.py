"""Short causal convolutions along sequences: the neutral default of ``causal_conv1d``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None) -> Tensor:
    """Convolve each channel with the last ``W`` tokens of its own sequence.

    ``y[t] = sum over j < W of weight[:, W - 1 - j] * x[t - j]``; before a sequence's first token stand
    zeros. This is ``torch.nn.Conv1d`` with one group per channel, padded on the left. One product per
    tap instead of a grouped convolution: faster on a processor, and the ends of packed sequences cost
    one comparison. Computed in float32 at least.

    Args:
        x: ``[B, S, D]``; packed, ``[1, T, D]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        silu: Apply SiLU to the result.
        cu_seqlens: int32 ``[N + 1]``, leading 0, where packed sequences start in the buffer; None =
            each row is a sequence. Tokens from its last entry on form a sequence of their own.

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
