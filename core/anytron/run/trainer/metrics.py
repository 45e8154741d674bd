"""Compute a step's metrics, and the throughput of a run in relation to its devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anytron.algorithms.advantages import by_group, differ, explained_variance
from anytron.base.components import TRAINING_ENGINES, engine_info
from anytron.base.errors import ConfigError, EngineError
from anytron.base.metric import is_maximum, joined
from anytron.run.preflight.capabilities import generates_in_training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Clock
    from anytron.run.trainer.experience import Experience
    from anytron.sequences.batch import RaggedBatch
    from anytron.task.rewards.sample import Sample
    from anytron.workers.engines.estimates import ModelFlops

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
        experience: All samples that were drawn for the step. Metrics of rewards and lengths cover all of them, also
            those that are not trained on; metrics of rewards leave out samples for which a reward failed.
        batch: The samples that were trained on; None if the step was skipped.
        outcomes: Results of the step's updates. A metric is the average, or the maximum, over the updates that were not
            skipped.
        clock: The step's times, in seconds.
    """
    samples, rewards = experience.samples, experience.rewards
    kept = rewards.total[~rewards.total.isnan()]
    rows = by_group(rewards.total, experience.groups)
    rows = rows[~rows.isnan().all(dim=1)]
    lengths = torch.tensor([sample.own_tokens for sample in samples], dtype=torch.float32)
    truncated = sum(not sample.finished for sample in samples) / len(samples)
    every = [one for sample in samples for one in sample.conversations]
    tokens = sum(len(one.prompt_tokens) + len(one.response_tokens) for one in every)
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
        epochs: Number of completed epochs of the data after the step.
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
    """Average the environments' metrics over samples whose environment did not fail; empty without environments."""
    found = [(sample, sample.environment) for sample in samples if sample.environment is not None]
    if not found:
        return {}
    whole = [(sample, outcome) for sample, outcome in found if outcome.failure is None]
    turns = [len(outcome.turns) for _, outcome in whole]
    numbers: dict[str, float] = {
        "turns_mean": sum(turns),
        "observation_tokens_mean": sum(sample.observed_tokens for sample, _ in whole),
        "conversations_mean": sum(len(sample.conversations) for sample, _ in whole),
    }
    for _, outcome in whole:
        for name, number in outcome.metrics.items():
            numbers[f"metrics/{name}"] = numbers.get(f"metrics/{name}", 0.0) + number
    averages = {f"environment/{name}": number / len(whole) for name, number in numbers.items()}
    return {"environment/failed": len(found) - len(whole), "environment/turns_max": max(turns)} | averages


def _averages(outcomes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each model's metrics over the updates that were not skipped, or over all if all were skipped."""
    averages = {}
    for name in outcomes[0]:
        skipped = "critic/update/skipped" if name.startswith("critic/") else "update/skipped"
        done = [outcome for outcome in outcomes if not outcome[skipped]] or outcomes
        together = joined(name, (outcome[name] for outcome in done))
        averages[name] = together if is_maximum(name) else together / len(done)
    skips = {name: sum(outcome[name] for outcome in outcomes) for name in averages if name.endswith("update/skipped")}
    return averages | skips


def check_agreement(metrics: Mapping[str, float], tolerance: float | None) -> None:
    """Check that rollout and training compute the same log-probs with the same weights.

    Args:
        metrics: Metrics of the step.
        tolerance: Largest mean absolute difference, in nats; None = no check.

    Raises:
        EngineError: The log-probs differ by more than ``tolerance`` nats on average.
    """
    if tolerance is None:
        return
    difference = metrics[AGREEMENT]
    if not difference <= tolerance:
        raise EngineError(
            "Rollout and training log-probs differ.",
            where=f"step {metrics['step']:.0f}",
            why=f"their mean absolute difference is {difference:.3g} nats; at most {tolerance:.3g} is allowed",
            fix="find the cause with: anytron verify CONFIG; or, if the difference is expected, raise "
            "trainer.rollout_log_prob_tolerance",
        )


@dataclass(frozen=True)
class Throughput:
    """Computes tokens per second and device, and model FLOP/s utilization (MFU).

    Attributes:
        devices: Number of devices of training ranks, and of rollout replicas with separate devices.
        peak_per_s: Operations that the devices of all training ranks can do in a second; None = not known.
        policy: Counter of the policy's floating-point operations; None = they are not known.
        critic: The same for the critic; None = not known, or there is no critic.
        epochs: Number of times that a step's updates train on each token.
        why_no_mfu: Why MFU cannot be computed; empty if it can.
    """

    devices: int
    peak_per_s: float | None
    policy: ModelFlops | None
    critic: ModelFlops | None
    epochs: int
    why_no_mfu: str = ""

    @classmethod
    def of(cls, config: RunConfig, facts: Sequence[Mapping[str, Any]]) -> Throughput:
        """Take the numbers of a run from its configuration and from the reports of its training ranks."""
        devices = devices_of(config, config.rollout.replicas)
        said = [rank.get("peak_flops") or {"per_s": None, "source": "the engine reports no peak"} for rank in facts]
        unknown = [peak["source"] for peak in said if peak["per_s"] is None]
        total = None if unknown else sum(peak["per_s"] for peak in said)
        policy, critic, why = None, None, "".join(unknown[:1])
        count = engine_info(TRAINING_ENGINES, config.engine.name, "engine.name").load_flops()
        if count is None:
            why = why or f"the engine {config.engine.name} does not count operations"
        else:
            try:
                policy, critic = count(config)
            except ConfigError as error:
                why = why or f"{error.what.rstrip('.')}; {error.why}"
        return cls(devices, total, policy, critic, config.algorithm.epochs, why)

    def remark(self, note: Callable[[str], None]) -> None:
        """Pass the reason to ``note`` if there is no MFU although the device's peak is known."""
        if self.peak_per_s is not None and self.why_no_mfu:
            note(f"throughput/mfu is not reported: {self.why_no_mfu}")

    def metrics(
        self, lengths: Sequence[int], metrics: Mapping[str, float], clock: Clock, *, updates_policy: bool
    ) -> dict[str, float]:
        """Compute the metrics of a step.

        Args:
            lengths: Tokens of each sequence that updates saw; empty if there were no updates.
            metrics: The step's metrics so far, with the throughput of all devices together.
            clock: The step's times.
            updates_policy: Whether the step updates the policy; False in the critic's warm-up.
        """
        found = {"throughput/tokens_per_s_per_device": metrics["throughput/tokens_per_s"] / self.devices}
        if lengths and self.peak_per_s is not None and self.policy is not None:
            models = [self.policy] if updates_policy else []
            models += [] if self.critic is None else [self.critic]
            needed = self.epochs * sum(model.update(lengths) for model in models)
            found["throughput/mfu"] = needed / clock.seconds["update"] / self.peak_per_s
        return found


def devices_of(config: RunConfig, replicas: int) -> int:
    """Return the number of devices of a run with this number of rollout replicas."""
    separate = config.rollout.placement == "separate" and not generates_in_training(config)
    return config.parallel.world_size + (replicas if separate else 0)
