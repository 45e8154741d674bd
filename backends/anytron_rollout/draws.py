"""Draw tokens with random numbers that belong to each response alone.

A number is a hash of the response's seed and the token's position: no generator has a state that batches could share.
Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_INCREMENT, _FIRST, _SECOND = (
    np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def uniform_numbers(seeds: Sequence[int], position: int) -> Tensor:
    """Give each row its number for a position: output ``position`` of the SplitMix64 generator of its seed.

    G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014); the constants are those of
    java.util.SplittableRandom. Computed on the host, so that all devices draw the same.

    Args:
        seeds: B numbers in ``[0, 2**64)``.
        position: From 0.

    Returns:
        float32 ``[B]`` on the host, multiples of ``2**-24`` in ``[0, 1)``.
    """
    with np.errstate(over="ignore"):  # modulo 2**64
        state = np.array(seeds, dtype=np.uint64) + _INCREMENT * np.uint64(position + 1)
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
    state ^= state >> np.uint64(31)
    return torch.from_numpy((state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


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
