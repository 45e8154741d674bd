"""Measure the loss of examples from which nothing is learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.run.trainer.trajectories import assemble_examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.run.preflight.prepare import HeldOutSet
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers


@dataclass(frozen=True)
class HeldOutLoss:
    """Has the training engine score examples, without gradients.

    Attributes:
        sets: Of examples; empty for a run without validation.
        trainer: Scores them.
        updates: How batches are divided.
        at_one_time: Examples of a batch.
    """

    sets: Sequence[HeldOutSet]
    trainer: TrainingWorkers
    updates: UpdatePlan
    at_one_time: int

    def __call__(self, step: int) -> dict[str, float]:
        """Measure the loss of each set with the weights that the engine has, whatever the step."""
        del step
        return {one.section.loss_metric: self._loss(one) for one in self.sets}

    def _loss(self, one: HeldOutSet) -> float:
        """Average the negative log-probs of a set's response tokens, in float64 over batches: nats per token."""
        sampler = one.prepared.sampler
        sampler.seek([(0, 0)] * len(sampler.tables))
        total, tokens = 0.0, 0
        for begin in range(0, len(sampler), self.at_one_time):
            batch = assemble_examples(one.prepared.draw(min(self.at_one_time, len(sampler) - begin)))
            log_probs = self.trainer.score(batch, self.updates, "policy")
            total -= log_probs[batch.response_mask].double().sum().item()
            tokens += int(batch.response_mask.sum())
        return total / tokens
