"""Do an update that gave NaN or infinity once more, on one rank, and find where the first such number arises."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.algorithms.losses import SupervisedLoss, ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import DataError
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import TrainingWorkers, training_group
from anytron.workers.engines.training_engine import InspectableEngine
from anytron.workers.remote import call

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.algorithms.contract import LossFunction
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.bad_batch import BadUpdate
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.inspection import Inspection
    from anytron.workers.executor.protocol import Executor


@dataclass(frozen=True)
class Finding:
    """What a replay has found.

    Attributes:
        data: Fields of the saved batch that hold numbers that are not finite, with the first such sequence and token.
        inspection: What the engine found.
        sequence: Position in the mini-batch of the sequence where the first bad number arises; None if not known.
        token_id: The token there.
    """

    data: tuple[str, ...]
    inspection: Inspection
    sequence: int | None = None
    token_id: int | None = None

    @property
    def reproduced(self) -> bool:
        """Whether anything was not finite."""
        return bool(self.data or self.inspection.weights or self.inspection.first)


def replay(
    update: BadUpdate, batch: RaggedBatch, config: RunConfig, executor: Executor, checkpoint: Path | None = None
) -> Finding:
    """Do the passes of a saved update on one rank, micro-batch by micro-batch as they were divided.

    Args:
        update: Where the mini-batch comes from.
        batch: The mini-batch.
        config: The run's, with one rank; its model is what the update starts from.
        executor: Starts that rank; the caller closes it.
        checkpoint: The engine's files of a checkpoint, to start from instead.

    Raises:
        DataError: The run has no such model.
        EngineError: The engine cannot do the passes.
    """
    if update.model == "critic" and config.critic is None:
        raise DataError("The update is a critic's, and the configuration has none.", where="critic")
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
    finding = Finding(_bad_fields(batch), inspection)
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
