"""Measure the loss of examples from which nothing is learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.trainer.trajectories import assemble_examples
from anytron.trainer.validation_schedule import ValidationSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.batch import RaggedBatch
    from anytron.config.schema import RunConfig
    from anytron.preflight.validation import HeldOutSet
    from anytron.sinks.delivery import MetricSinks
    from anytron.tracking.progress import Progress
    from anytron.tracking.run_directory import RunDirectory
    from anytron.trainer.checkpointing import Checkpointing
    from anytron.trainer.updates import UpdatePlan
    from anytron.trainer.workers import TrainingWorkers


class HeldOutLoss(ValidationSchedule):
    """Has the training engine score examples, without gradients.

    Args:
        config: The run.
        sets: Of examples; empty for a run without validation.
        trainer: Scores them.
        updates: How batches are divided.
        run: The run's directory.
        checkpoints: Keep what is best.
        progress: Is told of every validation.
        sinks: Are given its numbers.
        first: Steps behind the policy with which the run begins.
    """

    def __init__(
        self,
        config: RunConfig,
        sets: Sequence[HeldOutSet],
        trainer: TrainingWorkers,
        updates: UpdatePlan,
        run: RunDirectory,
        checkpoints: Checkpointing,
        progress: Progress,
        sinks: MetricSinks,
        first: int,
    ) -> None:
        super().__init__(config, run, checkpoints, progress, sinks, first)
        self._sets, self._trainer, self._updates = sets, trainer, updates

    def _measure(self, step: int) -> dict[str, float]:
        del step
        return {one.section.loss_metric: self._loss(one) for one in self._sets}

    def _loss(self, one: HeldOutSet) -> float:
        """Average the negative log-probs of a set's response tokens, in float64 over batches: nats per token."""
        sampler = one.prepared.sampler
        sampler.seek([(0, 0)] * len(sampler.tables))
        at_one_time, total, tokens = self._config.data.prompts_per_step, 0.0, 0
        for begin in range(0, len(sampler), at_one_time):
            batch = assemble_examples(one.prepared.draw(min(at_one_time, len(sampler) - begin)))
            log_probs = self._log_probs(batch)
            total -= log_probs[batch.response_mask].double().sum().item()
            tokens += int(batch.response_mask.sum())
        return total / tokens

    def _log_probs(self, batch: RaggedBatch) -> Tensor:
        """Score a batch, float32 ``[T]``; where replicas outnumber its sequences, some are scored twice."""
        count = max(batch.num_sequences, self._trainer.dp_size)
        enough = batch.select(torch.arange(count) % batch.num_sequences)
        return self._trainer.score(enough, self._updates, "policy")[: batch.num_tokens]
