"""Where the slots of context-parallel ranks lie in whole sequences (:class:`anytron.sequences.ContextShard`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def zigzag_order(padded: Tensor, size: int, slots: int) -> Tensor:
    """Give the place in the whole that each slot has, the ranks' slots one after the other: int64 ``[slots]``.

    Each sequence is cut into ``2 * size`` chunks; rank ``r`` holds the chunks ``r`` and ``2 * size - 1 - r`` of each
    sequence in turn. Nothing waits for the device.

    Args:
        padded: int64 ``[B]``, padded lengths, multiples of ``2 * size``.
        size: Context-parallel ranks.
        slots: Sum of ``padded``: tokens of the whole, padding included.
    """
    rank = torch.arange(size, device=padded.device)
    chunk = torch.stack([rank, 2 * size - 1 - rank], 1)
    width = padded // (2 * size)
    starts = padded.cumsum(0) - padded
    begins = starts[None, :, None] + chunk[:, None, :] * width[None, :, None]
    widths = width[None, :, None].expand_as(begins).flatten()
    shift = begins.flatten() - (widths.cumsum(0) - widths)
    ramp = torch.arange(slots, device=padded.device)
    return torch.repeat_interleave(shift, widths, output_size=slots).add_(ramp)


def inverted(order: Tensor) -> Tensor:
    """Invert a permutation, int64 ``[K]``: with that of :func:`zigzag_order`, the slot that shows each place."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
