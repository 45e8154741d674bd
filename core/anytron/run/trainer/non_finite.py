"""What becomes of a run when an update gives NaN or infinity; the engine has left the weights as they were."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import EngineError
from anytron.run.trainer.bad_batch import BadUpdate, write_bad_batch

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.algorithms.contract import LossFunction
    from anytron.config.algorithm import AlgorithmSection
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import UpdatedModel

BAD_BATCHES = "bad_batches"


class GuardedUpdates:
    """Does updates; saves the mini-batches of those that were skipped, and stops as ``trainer.on_non_finite`` says.

    Args:
        trainer: Does them.
        plan: How mini-batches are divided.
        config: The run's.
        directory: The run's.
        after: Training steps behind the weights that it begins with.
    """

    def __init__(
        self, trainer: TrainingWorkers, plan: UpdatePlan, config: RunConfig, directory: Path, *, after: int = 0
    ) -> None:
        self._trainer = trainer
        self._plan = plan
        self._config = config
        self._directory = directory
        self._in_a_row = {"policy": 0, "critic": 0}
        self._trained = {"policy": after > 0, "critic": after > 0}

    def update(self, mini_batch: RaggedBatch, loss: LossFunction, step: int, place: int) -> dict[str, float]:
        """Update the policy and return the metrics.

        Args:
            mini_batch: What it learns from.
            loss: The policy's, with the settings of the step: its KL coefficient may be another than the run's.
            step: Training step, from 1.
            place: Which update of the step it is, from 1.

        Raises:
            EngineError: The update was skipped, and the run is to stop.
        """
        metrics = self._trainer.update(mini_batch, self._plan, loss)
        algorithm = loss.algorithm if isinstance(loss, PolicyLoss) else self._config.algorithm
        self._look("policy", metrics, mini_batch, step, place, algorithm)
        return metrics

    def update_critic(self, mini_batch: RaggedBatch, loss: LossFunction, step: int, place: int) -> dict[str, float]:
        """Update the critic, otherwise as :meth:`update`."""
        metrics = self._trainer.update_critic(mini_batch, self._plan, loss)
        self._look("critic", metrics, mini_batch, step, place, self._config.algorithm)
        return metrics

    def _look(
        self,
        model: UpdatedModel,
        metrics: dict[str, float],
        mini_batch: RaggedBatch,
        step: int,
        place: int,
        algorithm: AlgorithmSection,
    ) -> None:
        prefix = "critic/" if model == "critic" else ""
        if not metrics[f"{prefix}update/skipped"]:
            self._in_a_row[model] = 0
            self._trained[model] = True
            return
        self._in_a_row[model] += 1
        bad = BadUpdate(
            step=step,
            update=place,
            model=model,
            dp_size=self._trainer.dp_size,
            micro_batch_multiple=self._plan.multiple,
            temperature=mini_batch.temperature,
            metrics=metrics,
        )
        directory = self._directory / BAD_BATCHES / bad.name
        write_bad_batch(directory, bad, mini_batch, self._config.model_copy(update={"algorithm": algorithm}))
        settings = self._config.trainer
        stops = settings.on_non_finite == "stop"
        if not stops and self._in_a_row[model] <= settings.max_skipped_updates:
            return
        self._save_weights(model, directory)
        loss = metrics.get("critic/loss" if model == "critic" else "loss/total")
        numbers = ("" if loss is None else f"the loss is {loss:.4g}, ") + (
            f"the norm of the gradient is {metrics[f'{prefix}grad_norm']:.4g}"
        )
        raise EngineError(
            "The loss or a gradient is not finite."
            if stops
            else f"{self._in_a_row[model]} updates in a row gave numbers that are not finite.",
            where=f"step {step}, update {place} of the {model}",
            why=f"{numbers}; the weights are as before the update",
            fix=f"see where it arises: anytron replay {directory}; {self._advice(model, loss)}or begin a new run with "
            "model.dtype=float32" + (", or go on without such updates: trainer.on_non_finite=skip" if stops else ""),
        )

    def _advice(self, model: UpdatedModel, loss: float | None) -> str:
        """Say what to try: of weights that no update has changed, something else computes NaN."""
        own = self._config.algorithm.loss
        theirs = model == "policy" and ":" in own and loss is not None and not math.isfinite(loss)
        first = f"look at {own} first: its loss is not finite; " if theirs else ""
        if not self._trained[model]:
            command = f"anytron verify {self._directory / 'config.yaml'}"
            return (
                f"{first}no update has changed the weights yet, so compare kernels and masks with others: {command}; "
            )
        section = "critic.optimizer" if model == "critic" else "optimizer"
        return f"{first}lower {section}.lr, set {section}.warmup_steps, "

    def _save_weights(self, model: UpdatedModel, directory: Path) -> None:
        """Save what the update started from. For an update that is skipped this would cost too much."""
        if model == "critic":
            self._trainer.save_critic(str(directory / "critic"))
        elif self._config.model.lora is not None:
            self._trainer.save_adapter(str(directory / "adapter"))
        else:
            self._trainer.save_hf(str(directory / "model"))
