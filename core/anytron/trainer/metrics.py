"""Compute a step's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.algorithms.gae import explained_variance
from anytron.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.batch import RaggedBatch
    from anytron.rewards.sample import Sample
    from anytron.rewards.scoring import RewardScores
    from anytron.tracking.clock import Clock


def step_metrics(
    step: int,
    samples: Sequence[Sample],
    rewards: RewardScores,
    group_size: int,
    batch: RaggedBatch,
    outcomes: Sequence[Mapping[str, float]],
    clock: Clock,
) -> dict[str, float]:
    """Compute the metrics of a step: one line of ``metrics.jsonl``.

    Args:
        step: Counted from 1.
        samples: The step's samples, groups side by side.
        rewards: Their rewards.
        group_size: Samples of one prompt.
        batch: The samples as they were trained on.
        outcomes: Results of the step's updates; the metrics are their averages.
        clock: The step's times, in seconds.
    """
    total = rewards.total
    groups = total.view(-1, group_size)
    lengths = torch.tensor([len(sample.response_tokens) for sample in samples], dtype=torch.float32)
    truncated = sum(not sample.finished for sample in samples) / len(samples)
    tokens = sum(len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples)
    seconds = clock.elapsed()
    metrics: dict[str, float] = {
        "step": step,
        "reward/mean": total.mean().item(),
        "reward/std": total.std(unbiased=False).item(),
    }
    if group_size > 1:
        metrics["reward/group_std_zero_fraction"] = (groups.amax(1) == groups.amin(1)).float().mean().item()
    if len(rewards.parts) > 1:
        metrics |= {f"reward/{name}/mean": part.mean().item() for name, part in rewards.parts.items()}
    metrics |= {name: sum(outcome[name] for outcome in outcomes) / len(outcomes) for name in outcomes[0]}
    if batch.values is not None and batch.returns is not None:
        metrics["critic/explained_variance"] = explained_variance(batch.values, batch.returns, batch.response_mask)
    metrics |= {
        "response/length_mean": lengths.mean().item(),
        "response/length_max": lengths.max().item(),
        "response/truncated_fraction": truncated,
        "response/empty_fraction": (lengths == 0).float().mean().item(),
    }
    metrics |= {f"time/{name}_s": spent for name, spent in clock.seconds.items()}
    return metrics | {"time/step_s": seconds, "throughput/tokens_per_s": tokens / seconds}


def check_agreement(metrics: Mapping[str, float], tolerance: float | None) -> None:
    """Stop if rollout and training compute different log-probs with the same weights.

    Raises:
        EngineError: Their log-probs differ by more than ``tolerance`` nats on average.
    """
    difference = metrics["rollout/log_prob_abs_diff"]
    if tolerance is not None and not difference <= tolerance:
        raise EngineError(
            "Rollout and training log-probs differ.",
            where=f"step {metrics['step']:.0f}",
            why=f"mean absolute difference {difference:.3g} nats, allowed {tolerance:.3g}",
            fix="look for differing dtypes or kernels; raise trainer.rollout_log_prob_tolerance if it is expected",
        )
