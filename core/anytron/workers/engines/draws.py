"""Draw tokens with random numbers that belong to each response alone.

A number is a hash of the response's seed and the token's position: no generator has a state that batches could share.
Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def uniform_numbers(seeds: Sequence[int], position: int | Tensor) -> Tensor:
    """Give each row its number for a position: output ``position`` of the SplitMix64 generator of its seed.

    G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014); the constants are those of
    java.util.SplittableRandom. Computed on the host, so that all devices draw the same.

    Args:
        seeds: B numbers in ``[0, 2**63)``.
        position: From 0; of all rows, or int64 ``[B]`` on the host.

    Returns:
        float32 ``[B]`` on the host, multiples of ``2**-24`` in ``[0, 1)``.
    """
    state = torch.tensor(seeds, dtype=torch.int64) + (torch.as_tensor(position) + 1) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ _shifted(state, 31)
    return _shifted(state, 40).float() * 2.0**-24


def _signed(value: int) -> int:
    """Give the int64 of the same 64 bits: torch multiplies those modulo 2**64, and unsigned ones hardly at all."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token for each row by inverting its distribution function.

    Args:
        log_probs: float32 ``[B, V]``, -inf for a token that may not be drawn; they need not add up to 1.
        uniform: float32 ``[B]`` in ``[0, 1)``, on the same device.

    Returns:
        int64 ``[B]``.
    """
    probabilities = torch.softmax(log_probs, dim=-1)
    below = probabilities.cumsum(-1)
    # The total may differ from 1 by rounding; uniform * total is less than it, also after rounding.
    reached = below > uniform[:, None] * below[:, -1:]
    # A parallel sum need not be monotonic to the last digit: what has no probability is never drawn.
    return (reached & (probabilities > 0)).int().argmax(-1)
