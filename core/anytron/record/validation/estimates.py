"""Estimates from several responses to each of some prompts, and how far to trust them.

Prompts are what is drawn independently; responses to one prompt resemble each other. So each prompt gives one number,
and intervals come from how these differ between prompts (https://arxiv.org/abs/2411.00640, section 2.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CONFIDENCE = 0.95
"""Of intervals: so often they would hold the truth, were prompts drawn anew again and again."""
RESAMPLES = 2000
"""Draws of the bootstrap; 1000 to 2000 suffice for percentiles (Efron and Tibshirani 1993, section 13.3)."""
_DRAWN_AT_ONCE = 1 << 22
"""Prompts that are drawn at one time, so that large sets need no more memory."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate the probability that at least one of k responses to a prompt passes, without bias.

    It is the share of all choices of k of the responses that hold one that passes,
    ``1 - C(samples - passed, k) / C(samples, k)`` (https://arxiv.org/abs/2107.03374, equation 1), in exact integers.

    Args:
        samples: Responses to the prompt.
        passed: Those that passed.
        k: From 1 to ``samples``.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def interval(values: Tensor) -> tuple[float, float] | None:
    """Give the confidence interval of the mean of prompts' numbers: percentiles of the bootstrap over prompts.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3. It is the same whenever it is computed
    from the same numbers: draws come from a generator of their own. Prompts that are all alike say nothing of their
    spread; the interval has no width then.

    Args:
        values: ``[P]``, one number of each prompt.

    Returns:
        Its ends; None with fewer than two prompts.
    """
    count = len(values)
    if count < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    at_once = max(1, _DRAWN_AT_ONCE // count)
    means = torch.cat(
        [
            values.double()[torch.randint(count, (min(at_once, RESAMPLES - done), count), generator=generator)].mean(1)
            for done in range(0, RESAMPLES, at_once)
        ]
    )
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = torch.quantile(means, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return low, high
