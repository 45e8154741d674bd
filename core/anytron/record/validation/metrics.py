"""Compute the metrics of a validation set."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from anytron.record.validation.estimates import interval, pass_at_k

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.config.scoring import ValidationSetSection
    from anytron.task.rewards.sample import Sample
    from anytron.task.rewards.scoring import RewardScores

ROUNDING = 1e-6
"""Part of a threshold by which float32 may miss it: weights of rewards that add up to 1, like 0.35, 0.45 and 0.2."""


def set_metrics(section: ValidationSetSection, samples: Sequence[Sample], rewards: RewardScores) -> dict[str, float]:
    """Compute the metrics of a set.

    Args:
        section: The set.
        samples: ``section.samples_per_prompt`` responses to each prompt, side by side.
        rewards: Theirs. A response that was dropped counts neither as passed nor as failed, and a prompt that has
            fewer than k others is in no ``pass@k``.

    Returns:
        A number for each metric; NaN where no prompt is left that has one.
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
