"""Handle updates that gave NaN or infinity: continue or end the run, save the mini-batches, and replay them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from anytron.algorithms.losses import SupervisedLoss, ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import DataError, EngineError
from anytron.base.files import PRIVATE, exhausted, remove, write_durably
from anytron.config.dump import to_yaml
from anytron.config.json_files import read_object
from anytron.run.groups import training_group
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import TrainingWorkers
from anytron.sequences.batch import RaggedBatch
from anytron.task.data.images import ImagePatches
from anytron.workers.engines.training_engine import InspectableEngine
from anytron.workers.executor.protocol import call

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from anytron.algorithms.contract import LossFunction
    from anytron.config.algorithm import AlgorithmSection
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.updates import MiniBatch
    from anytron.workers.engines.training_engine import Inspection, UpdatedModel
    from anytron.workers.executor.protocol import Executor

TENSORS, RECORD, CONFIG = "batch.safetensors", "batch.json", "config.yaml"
FORMAT = 1
BAD_BATCHES = "bad_batches"


class GuardedUpdates:
    """Updates the models; saves mini-batches of skipped updates, and ends the run if ``trainer.on_non_finite`` says so.

    Args:
        trainer: The training engine, which runs the updates.
        plan: How mini-batches are divided.
        config: The run's configuration.
        directory: The run directory.
        after: Number of training steps that were completed before the run started or was resumed; 0 = no update has
            changed the weights yet.
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

    def update(self, mini_batch: MiniBatch, loss: LossFunction, step: int, place: int) -> dict[str, float]:
        """Update the policy and return the metrics.

        Args:
            mini_batch: The mini-batch of the update.
            loss: Loss of the policy with the settings of the step: its KL coefficient may differ from the run's.
            step: Number of the training step, from 1.
            place: Number of the update in the step, from 1.

        Raises:
            EngineError: The update was skipped, and the run is to stop.
        """
        metrics = self._trainer.update(mini_batch, self._plan, loss)
        algorithm = loss.algorithm if isinstance(loss, PolicyLoss) else self._config.algorithm
        self._look("policy", metrics, mini_batch, step, place, algorithm)
        return metrics

    def update_critic(self, mini_batch: MiniBatch, loss: LossFunction, step: int, place: int) -> dict[str, float]:
        """Update the critic; arguments, result and errors as in :meth:`update`."""
        metrics = self._trainer.update_critic(mini_batch, self._plan, loss)
        self._look("critic", metrics, mini_batch, step, place, self._config.algorithm)
        return metrics

    def _look(
        self,
        model: UpdatedModel,
        metrics: dict[str, float],
        mini_batch: MiniBatch,
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
            temperature=mini_batch.whole.temperature,
            metrics=metrics,
        )
        directory = self._directory / BAD_BATCHES / bad.name
        write_bad_batch(directory, bad, mini_batch.batch, self._config.model_copy(update={"algorithm": algorithm}))
        settings = self._config.trainer
        stops = settings.on_non_finite == "stop"
        if not stops and self._in_a_row[model] <= settings.max_skipped_updates:
            return
        self._save_weights(model, directory)
        loss = metrics.get("critic/loss" if model == "critic" else "loss/total")
        norm = metrics[f"{prefix}grad_norm"]
        if loss is None:
            why = f"the norm of the gradient is {norm:.4g}; the weights are as before the update"
        else:
            why = (
                f"the loss is {loss:.4g}, the norm of the gradient is {norm:.4g}; the weights are as before the update"
            )
        raise EngineError(
            "The loss or a gradient is not finite."
            if stops
            else f"The loss or a gradient was not finite in {self._in_a_row[model]} updates in a row.",
            where=f"step {step}, update {place} of the {model}",
            why=why,
            fix=f"run `anytron replay {directory}` to find the first non-finite value; {self._advice(model, loss)}"
            "or start a new run with model.dtype=float32"
            + (". To skip such updates, set trainer.on_non_finite=skip" if stops else ""),
        )

    def _advice(self, model: UpdatedModel, loss: float | None) -> str:
        """Say what to try. If no update has changed the weights yet, the learning rate is not the cause."""
        own = self._config.algorithm.loss
        theirs = model == "policy" and ":" in own and loss is not None and not math.isfinite(loss)
        first = f"look at {own} first: its loss is not finite; " if theirs else ""
        if not self._trained[model]:
            command = f"anytron verify {self._directory / 'config.yaml'}"
            return f"{first}no update has changed the weights yet, so compare the engine with Hugging Face: {command}; "
        section = "critic.optimizer" if model == "critic" else "optimizer"
        return f"{first}lower {section}.lr, set {section}.warmup_steps, "

    def _save_weights(self, model: UpdatedModel, directory: Path) -> None:
        """Save the weights from which the update started. This is too slow to do for every skipped update."""
        if model == "critic":
            self._trainer.save_critic(str(directory / "critic"))
        elif self._config.model.lora is not None:
            self._trainer.save_adapter(str(directory / "adapter"))
        else:
            self._trainer.save_hf(str(directory / "model"))


@dataclass(frozen=True)
class BadUpdate:
    """The update in which a mini-batch gave NaN or infinity.

    Attributes:
        step: Number of the training step, from 1.
        update: Number of the update in that step, from 1.
        model: The model that was to be updated.
        dp_size: Number of data-parallel replicas among which the mini-batch was divided.
        micro_batch_multiple: As in :class:`~anytron.workers.engines.training_engine.Topology`.
        temperature: Sampling temperature of the batch.
        metrics: Metrics of the update.
    """

    step: int
    update: int
    model: UpdatedModel
    dp_size: int
    micro_batch_multiple: int
    temperature: float
    metrics: Mapping[str, float]

    @property
    def name(self) -> str:
        """Name of the directory of the mini-batch."""
        return f"step-{self.step:06d}-update-{self.update}" + ("-critic" if self.model == "critic" else "")


def write_bad_batch(directory: Path, update: BadUpdate, batch: RaggedBatch, config: RunConfig) -> None:
    """Write everything that is needed to repeat an update; files of an earlier attempt at the same step are deleted.

    ==================== ===============================================================================
    ``batch.safetensors`` the batch's tensors; images as ``images.N.FIELD``
    ``batch.json``        step, update and model of the batch, and the metrics of the update
    ``config.yaml``       the run's configuration, with the KL coefficient of the step: the loss follows from it
    ``model/``            the weights that were to be updated, if the run stopped (or ``adapter/``, ``critic/``)
    ==================== ===============================================================================
    """
    tensors = {field.name: value for field in fields(batch) if isinstance(value := getattr(batch, field.name), Tensor)}
    for index, patches in enumerate(batch.images or ()):
        if patches is not None:
            tensors |= {f"images.{index}.{name}": value for name, value in vars(patches).items()}
    remove(directory)
    directory.mkdir(parents=True)
    # safetensors refuses tensors that share memory, as a batch's may.
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, directory / TENSORS)
    write_durably(directory / CONFIG, to_yaml(config), PRIVATE)  # it may hold secrets
    record = {"format": FORMAT, "has_images": batch.images is not None, **asdict(update)}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_bad_batch(directory: Path) -> tuple[BadUpdate, RaggedBatch]:
    """Read what :func:`write_bad_batch` wrote.

    Raises:
        DataError: The directory does not contain a saved mini-batch.
    """
    try:
        record = read_object(directory / RECORD)
        tensors: dict[str, Any] = load_file(directory / TENSORS)
        if record.pop("format") != FORMAT:
            raise _unreadable(directory, f"its format is not {FORMAT}, the only format that this version reads")
        has_images = record.pop("has_images")
        update = BadUpdate(**record)
        images = _images(tensors, tensors["lengths"].numel()) if has_images else None
        batch = RaggedBatch(temperature=update.temperature, images=images, **tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise exhausted(error, str(directory)) or _unreadable(directory, f"{type(error).__name__}: {error}") from error
    return update, batch


def _images(tensors: dict[str, Tensor], sequences: int) -> tuple[ImagePatches | None, ...]:
    """Take the images out of the tensors."""
    names = [field.name for field in fields(ImagePatches)]
    found = [
        {name: tensors.pop(f"images.{index}.{name}") for name in names if f"images.{index}.{name}" in tensors}
        for index in range(sequences)
    ]
    return tuple(ImagePatches(**patches) if patches else None for patches in found)


def _unreadable(directory: Path, why: str) -> DataError:
    return DataError(
        "This is not a saved mini-batch.",
        where=str(directory),
        why=why,
        fix="give a directory below bad_batches/ in a run's directory",
    )


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        data: Fields of the saved batch that hold numbers that are not finite, with the first such sequence and token.
        inspection: Result of the engine's inspection.
        sequence: Position in the mini-batch of the sequence with the first non-finite number; None if not known.
        token_id: Id of the token with that number; None if not known.
    """

    data: tuple[str, ...]
    inspection: Inspection
    sequence: int | None = None
    token_id: int | None = None

    @property
    def reproduced(self) -> bool:
        """Whether the replay found a non-finite number."""
        return bool(self.data or self.inspection.weights or self.inspection.first)


def replay(
    update: BadUpdate, batch: RaggedBatch, config: RunConfig, executor: Executor, checkpoint: Path | None = None
) -> ReplayResult:
    """Repeat the forward and backward passes of a saved update on one rank, with the same micro-batches.

    Args:
        update: Origin of the mini-batch.
        batch: The mini-batch.
        config: Configuration of the run, with one rank; the update starts from its model.
        executor: Starts that rank; the caller closes it.
        checkpoint: Directory of the engine's files in a checkpoint to start from; None = the model of ``config``.

    Raises:
        DataError: The update is one of the critic, and ``config`` has no critic.
        EngineError: The engine cannot do the passes.
    """
    if update.model == "critic" and config.critic is None:
        raise DataError(
            "The mini-batch belongs to the critic, but the configuration has no critic.",
            where="critic",
            fix="set section critic as in the run that saved the mini-batch",
        )
    loss: LossFunction = SupervisedLoss() if config.supervised else PolicyLoss(config.corrected_algorithm)
    if config.critic is not None and update.model == "critic":
        loss = ValueLoss(config.critic.clip_value)
    group = executor.start(training_group(config))
    trainer = TrainingWorkers.of(group)
    if checkpoint is not None:
        trainer.load_checkpoint(str(checkpoint))
    plan = replace(UpdatePlan.from_config(config, trainer.topology[0]), multiple=update.micro_batch_multiple)
    micro_batches = [one for share in plan.micro_batches(batch, update.dp_size) for one in share]
    batches = [one.batch for one in micro_batches]
    (inspection,) = call(group, InspectableEngine.inspect_update, batches, loss, update.model)
    finding = ReplayResult(_bad_fields(batch), inspection)
    first = inspection.first
    if first is None or first.sequence is None or first.token is None:
        return finding
    sequence = micro_batches[first.micro_batch].sequences[first.sequence]
    token = int(batch.lengths[:sequence].sum()) + first.token
    return replace(finding, sequence=sequence, token_id=int(batch.tokens[token]))


def _bad_fields(batch: RaggedBatch) -> tuple[str, ...]:
    """Name the fields that hold NaN or infinity, with the place of the first."""
    found = []
    ends = torch.cumsum(batch.lengths, 0)
    for field in fields(batch):
        values = getattr(batch, field.name)
        if isinstance(values, Tensor) and values.is_floating_point() and not bool(values.isfinite().all()):
            token = int((~values.isfinite()).nonzero()[0, 0])
            sequence = int(torch.searchsorted(ends, token, right=True))
            place = token - int(ends[sequence] - batch.lengths[sequence])
            found.append(f"{field.name} ({values[token].item()} at sequence {sequence}, token {place})")
    return tuple(found)
