"""Metrics of a validation set, their confidence intervals, and the choice of the best of several validations.

Prompts are drawn independently; responses to one prompt resemble each other. So each prompt gives one number, and
intervals come from how these numbers differ between prompts (https://arxiv.org/abs/2411.00640, section 2.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.config.scoring import ValidationSetSection
    from anytron.task.rewards.sample import Sample
    from anytron.task.rewards.scoring import RewardScores


CONFIDENCE = 0.95
"""Confidence level of intervals: the share of intervals that contain the true mean if prompts are drawn anew often."""
RESAMPLES = 2000
"""Draws of the bootstrap; 1000 to 2000 suffice for percentiles (Efron and Tibshirani 1993, section 13.3)."""
_DRAWN_AT_ONCE = 1 << 22
"""Largest number of prompts that the bootstrap draws at one time, which bounds its memory."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate the probability that at least one of k responses to a prompt passes, without bias.

    The estimate is the share of all subsets of k responses that contain a passing response, ``1 - C(samples - passed,
    k) / C(samples, k)`` (https://arxiv.org/abs/2107.03374, equation 1), computed in exact integers.

    Args:
        samples: Number of responses to the prompt.
        passed: Number of responses that passed.
        k: Number of tries, from 1 to ``samples``.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def interval(values: Tensor) -> tuple[float, float] | None:
    """Return the confidence interval of the mean over prompts: percentiles of the bootstrap over prompts.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3. The result is the same
    whenever it is computed from the same numbers: the random generator has a fixed seed. If all numbers are equal, the
    interval has no width.

    Args:
        values: ``[P]``, one number of each prompt.

    Returns:
        Both ends of the interval; None with fewer than two prompts.
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


ROUNDING = 1e-6
"""Relative tolerance of ``pass_threshold``: in float32, reward weights like 0.35, 0.45 and 0.2 may not add up to 1."""


def set_metrics(section: ValidationSetSection, samples: Sequence[Sample], rewards: RewardScores) -> dict[str, float]:
    """Compute the metrics of a validation set.

    Args:
        section: Configuration section of the set.
        samples: ``section.samples_per_prompt`` responses to each prompt, side by side.
        rewards: Rewards of the samples. A response that was dropped counts neither as passed nor as failed, and a
            prompt with fewer than k remaining responses is not counted in ``pass@k``.

    Returns:
        Values by metric name; NaN for a metric in which no prompt can be counted.
    """
    groups = rewards.total.view(-1, section.samples_per_prompt)
    kept = ~groups.isnan()
    passed = groups >= section.pass_threshold - ROUNDING * max(1.0, abs(section.pass_threshold))
    means = groups.double().nanmean(dim=1)
    metrics = _estimate(section.mean_metric, means[~means.isnan()])
    counted = list(zip(kept.sum(1).tolist(), passed.sum(1).tolist(), strict=True))
    for k in section.pass_at:
        found = [pass_at_k(count, passed, k) for count, passed in counted if count >= k]
        metrics |= _estimate(section.pass_metric(k), torch.tensor(found, dtype=torch.float64))
    name = f"validation/{section.name}"
    if len(rewards.parts) > 1:
        metrics |= {f"{name}/reward/{part}/mean": values.nanmean().item() for part, values in rewards.parts.items()}
    return metrics | {
        f"{name}/response/length_mean": sum(sample.own_tokens for sample in samples) / len(samples),
        f"{name}/response/truncated_fraction": sum(not sample.finished for sample in samples) / len(samples),
        f"{name}/failed": float((~kept).sum()),
    }


def _estimate(name: str, values: Tensor) -> dict[str, float]:
    """Average prompts' numbers, with an interval if there are two prompts or more."""
    metrics = {name: values.mean().item() if len(values) else math.nan}
    ends = interval(values)
    return metrics if ends is None else metrics | {f"{name}/low": ends[0], f"{name}/high": ends[1]}


Direction = Literal["max", "min"]


@dataclass(frozen=True)
class Standing:
    """The state of a metric after some validations.

    Attributes:
        best_step: The step with its best value; None as long as all values were NaN.
        best: The best value; None as long as all values were NaN.
        waited: Number of validations since ``best_step``.
    """

    best_step: int | None = None
    best: float | None = None
    waited: int = 0


def is_better(value: float, best: float | None, direction: Direction, min_delta: float = 0.0) -> bool:
    """Whether a value beats the best one so far by more than ``min_delta``; NaN never does."""
    if best is None:
        return not math.isnan(value)
    return value > best + min_delta if direction == "max" else value < best - min_delta


def standing(found: Iterable[tuple[int, float]], direction: Direction, min_delta: float) -> Standing:
    """Find the best value of a metric, and count the validations after it; ``found`` holds (step, value) pairs.

    As in other trainers' early stopping, a value that is better by ``min_delta`` or less is ignored. The best value
    stays, so that several small improvements count once their sum exceeds ``min_delta``.
    """
    now = Standing()
    for step, value in found:
        better = is_better(value, now.best, direction, min_delta)
        now = Standing(step, value) if better else Standing(now.best_step, now.best, now.waited + 1)
    return now
