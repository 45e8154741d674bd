"""Compute a step's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.algorithms.advantages.gae import explained_variance
from anytron.algorithms.advantages.groups import by_group, differ
from anytron.base.errors import EngineError
from anytron.base.metric import is_maximum, joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.record.tracking.progress import Clock
    from anytron.run.trainer.experience import Experience
    from anytron.sequences.batch import RaggedBatch
    from anytron.task.rewards.sample import Sample

AGREEMENT = "rollout/log_prob_abs_diff"
"""How far rollout and training log-probs of a token are apart, on average, in nats."""


def step_metrics(
    step: int,
    experience: Experience,
    batch: RaggedBatch | None,
    outcomes: Sequence[Mapping[str, float]],
    clock: Clock,
) -> dict[str, float]:
    """Compute the metrics of a step: one line of ``metrics.jsonl``.

    Args:
        step: Counted from 1.
        experience: All samples that were drawn for the step: rewards and lengths are the policy's, whatever it is
            trained on. Samples that a reward failed for are in none of the rewards' metrics.
        batch: Those that were trained on; None if the step was skipped.
        outcomes: Results of the step's updates; the metrics are the averages, or the largest, of those that were not
            skipped.
        clock: The step's times, in seconds.
    """
    samples, rewards = experience.samples, experience.rewards
    kept = rewards.total[~rewards.total.isnan()]
    rows = by_group(rewards.total, experience.groups)
    rows = rows[~rows.isnan().all(dim=1)]
    lengths = torch.tensor([sample.own_tokens for sample in samples], dtype=torch.float32)
    truncated = sum(not sample.finished for sample in samples) / len(samples)
    tokens = sum(len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples)
    seconds = clock.elapsed()
    metrics: dict[str, float] = {
        "step": step,
        "reward/mean": kept.mean().item(),
        "reward/std": kept.std(unbiased=False).item(),
    }
    if rows.shape[1] > 1:
        metrics["reward/group_std_zero_fraction"] = (~differ(rows)).float().mean().item()
    if len(rewards.parts) > 1:
        metrics |= {f"reward/{name}/mean": part[~part.isnan()].mean().item() for name, part in rewards.parts.items()}
    metrics |= {f"reward/{name}/failed": len(failures) for name, failures in rewards.failures.items()}
    metrics |= _of_environments(samples)
    metrics |= _averages(outcomes)
    if batch is not None and batch.values is not None and batch.returns is not None:
        metrics["critic/explained_variance"] = explained_variance(batch.values, batch.returns, batch.response_mask)
    metrics |= {
        "response/length_mean": lengths.mean().item(),
        "response/length_max": lengths.max().item(),
        "response/truncated_fraction": truncated,
        "response/empty_fraction": (lengths == 0).float().mean().item(),
    }
    metrics |= {f"time/{name}_s": spent for name, spent in clock.seconds.items()}
    return metrics | {"time/step_s": seconds, "throughput/tokens_per_s": tokens / seconds}


def supervised_metrics(
    step: int, batch: RaggedBatch, outcome: Mapping[str, float], epochs: float, clock: Clock
) -> dict[str, float]:
    """Compute the metrics of a step of supervised fine-tuning.

    Args:
        step: Counted from 1.
        batch: The step's examples.
        outcome: Result of the step's update.
        epochs: Of the data, behind the step.
        clock: The step's times, in seconds.
    """
    sequence = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    lengths = torch.zeros(batch.num_sequences).index_add_(0, sequence, batch.response_mask.float())
    seconds = clock.elapsed()
    return {
        "step": step,
        **outcome,
        "data/epochs": epochs,
        "response/length_mean": lengths.mean().item(),
        "response/length_max": lengths.max().item(),
        **{f"time/{name}_s": spent for name, spent in clock.seconds.items()},
        "time/step_s": seconds,
        "throughput/tokens_per_s": batch.num_tokens / seconds,
    }


def _of_environments(samples: Sequence[Sample]) -> dict[str, float]:
    """Average what environments say of samples that they have not failed for; nothing without environments."""
    found = [(sample, sample.environment) for sample in samples if sample.environment is not None]
    if not found:
        return {}
    whole = [(sample, outcome) for sample, outcome in found if outcome.failure is None]
    turns = [len(outcome.turns) for _, outcome in whole]
    read = [len(sample.response_tokens) - sample.own_tokens for sample, _ in whole]
    numbers: dict[str, float] = {"turns_mean": sum(turns), "observation_tokens_mean": sum(read)}
    for _, outcome in whole:
        for name, number in outcome.metrics.items():
            numbers[f"metrics/{name}"] = numbers.get(f"metrics/{name}", 0.0) + number
    averages = {f"environment/{name}": number / len(whole) for name, number in numbers.items()}
    return {"environment/failed": len(found) - len(whole), "environment/turns_max": max(turns)} | averages


def _averages(outcomes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each model's metrics over its updates; those of skipped ones count if there is no other."""
    averages = {}
    for name in outcomes[0]:
        skipped = "critic/update/skipped" if name.startswith("critic/") else "update/skipped"
        done = [outcome for outcome in outcomes if not outcome[skipped]] or outcomes
        together = joined(name, (outcome[name] for outcome in done))
        averages[name] = together if is_maximum(name) else together / len(done)
    skips = {name: sum(outcome[name] for outcome in outcomes) for name in averages if name.endswith("update/skipped")}
    return averages | skips


def check_agreement(metrics: Mapping[str, float], tolerance: float | None) -> None:
    """Stop if rollout and training compute different log-probs with the same weights.

    Raises:
        EngineError: Their log-probs differ by more than ``tolerance`` nats on average.
    """
    if tolerance is None:
        return
    difference = metrics[AGREEMENT]
    if not difference <= tolerance:
        raise EngineError(
            "Rollout and training log-probs differ.",
            where=f"step {metrics['step']:.0f}",
            why=f"mean absolute difference {difference:.3g} nats, allowed {tolerance:.3g}",
            fix="look for differing dtypes or kernels; raise trainer.rollout_log_prob_tolerance if it is expected",
        )
