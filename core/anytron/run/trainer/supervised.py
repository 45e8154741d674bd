"""The loop of supervised fine-tuning: no generation or rewards, but the same engine and updates as in RL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.algorithms.losses import SupervisedLoss
from anytron.base.seeds import derive_seed
from anytron.run.trainer.experience import assemble_examples
from anytron.run.trainer.frame import RunFrame
from anytron.run.trainer.metrics import supervised_metrics
from anytron.run.trainer.models import write_random_model
from anytron.run.trainer.non_finite import GuardedUpdates
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import start_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.run.preflight.prepare import HeldOutSet, PreparedPrompts
    from anytron.run.trainer.frame import Attempt, RunSummary
    from anytron.run.trainer.workers import TrainingWorkers


def fine_tune(attempt: Attempt, prepared: PreparedPrompts, examined: list[HeldOutSet]) -> RunSummary:
    """Train a policy on the responses in the data; errors as in :func:`anytron.run.trainer.loop.train`.

    Args:
        attempt: The run, and where it begins.
        prepared: The training examples.
        examined: The examples for validation.
    """
    config = attempt.config
    write_random_model(config, prepared.tokenizer)
    trainer = start_training(attempt.executor, config)
    plan = UpdatePlan.from_config(config, trainer.topology[0])
    held_out = HeldOutLoss(examined, trainer, plan, config.data.prompts_per_step)
    frame = RunFrame(attempt, trainer, prepared, prepared.tokenizer, held_out, {})
    guarded = GuardedUpdates(trainer, plan, config, frame.directory, after=attempt.start.step)
    loss = SupervisedLoss()
    with frame:
        for step in frame.steps():
            if not frame.begin(step):
                break
            with frame.checkpoints.abandonable(), step.clock.measure("data"):
                batch = assemble_examples(prepared.draw(config.data.prompts_per_step))
            with step.clock.measure("update"):
                batch = trainer.with_scores(batch, plan, reference=False)
                (mini_batch,) = plan.mini_batches(batch, derive_seed(config.trainer.seed, "mini-batches", step.number))
                outcome = guarded.update(mini_batch, loss, step.number, 1)
                frame.alarms.updated(mini_batch, outcome)
            metrics = supervised_metrics(step.number, batch, outcome, prepared.sampler.epochs, step.clock)
            metrics |= frame.throughput.metrics(batch.lengths.tolist(), metrics, step.clock, updates_policy=True)
            frame.record(step, metrics | trainer.peak_memory())
        frame.finish()
    return frame.summary()


@dataclass(frozen=True)
class HeldOutLoss:
    """Measures the loss of held-out examples, which the training engine scores.

    Attributes:
        sets: Sets of examples; empty for a run without validation.
        trainer: Training ranks, which score the examples.
        updates: Plan by which batches are divided.
        at_one_time: Number of examples in a batch.
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
