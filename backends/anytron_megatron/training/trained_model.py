"""Update one model: gradient buffers, optimizer and learning-rate schedule. Does not build models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.errors import EngineError
from anytron_megatron.training import parallel
from anytron_megatron.training.optimizer import build_optimizer, wrap_for_training
from anytron_megatron.training.schedule import ModelChunk, forward_backward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.algorithms.contract import LossFunction
    from anytron.batch import RaggedBatch
    from anytron.config.schema import OptimizerSection
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import Feature

NOT_FINITE = "in local grad norm"
"""What Megatron says of a NaN in a gradient buffer (megatron/core/distributed/param_and_grad_buffer.py,
``check_grads``), in a RuntimeError before the ranks exchange gradients."""


class TrainedModel:
    """A model that an optimizer updates.

    Args:
        chunks: The model on this rank, its modules as they were built, with what is not to be trained frozen.
        key: Where the optimizer stands in the run's configuration, for errors.
        dtype: Element type of the parameters; with bfloat16 the optimizer keeps float32 copies.
        steps: Training steps of the whole run.
        updates_per_step: Updates in each.

    Attributes:
        chunks: The same chunks, each module in its data-parallel wrapper.
        optimizer: Megatron's.
        updates: Updates done.
    """

    def __init__(
        self,
        chunks: Sequence[ModelChunk],
        preparer: BatchPreparer,
        optimizer: OptimizerSection,
        *,
        key: str = "optimizer",
        dtype: torch.dtype,
        distributed_optimizer: bool,
        steps: int,
        updates_per_step: int,
    ) -> None:
        wrapped = wrap_for_training([chunk.module for chunk in chunks], distributed_optimizer=distributed_optimizer)
        self.chunks = [ModelChunk(module, chunk.head) for module, chunk in zip(wrapped, chunks, strict=True)]
        self.updates = 0
        self._preparer = preparer
        self._key = key
        self.optimizer, self._scheduler = build_optimizer(
            optimizer,
            wrapped,
            dtype=dtype,
            distributed_optimizer=distributed_optimizer,
            steps=steps,
            updates_per_step=updates_per_step,
        )

    @property
    def schedule_steps(self) -> int:
        """Where the learning-rate schedule stands."""
        return int(self._scheduler.num_steps)

    def continue_from(self, updates: int, schedule_steps: int) -> None:
        """Count on from here. The schedule keeps its shape: the run may have become longer."""
        self.updates = updates
        self._scheduler.num_steps = schedule_steps
        self._scheduler.step(increment=0)

    def update(
        self,
        micro_batches: Sequence[RaggedBatch],
        loss_fn: LossFunction,
        *features: Feature,
    ) -> Mapping[str, float] | None:
        """Do one optimizer update on this replica's micro-batches, as many as on every other. A collective.

        Returns:
            On reporting ranks: the parts' metrics, added up, ``grad_norm`` and ``lr``. None elsewhere.

        Raises:
            EngineError: The gradients are not finite; the weights are as before.
        """
        for chunk in self.chunks:
            chunk.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        try:
            parts = forward_backward(self.chunks, micro_batches, self._preparer, loss_fn, *features)
        except RuntimeError as error:
            if NOT_FINITE not in str(error):
                raise
            raise EngineError(
                "The gradients are not finite.",
                where=f"update {self.updates + 1}",
                why=str(error),
                fix=f"lower {self._key}.lr, set {self._key}.warmup_steps, or try model.dtype=float32; "
                "metrics.jsonl shows what led to it",
            ) from error
        successful, grad_norm, _ = self.optimizer.step()
        if not successful:
            raise EngineError("The optimizer refused the gradients.", where="update", why="they are not finite")
        lr = self._scheduler.get_lr(self.optimizer.param_groups[0])
        self._scheduler.step(increment=1)
        self.updates += 1
        if not parallel.topology().reports:
            return None
        names = parts[0].keys()
        sums = torch.stack([torch.stack([part[name].detach().float() for name in names]) for part in parts]).sum(0)
        return {**dict(zip(names, sums.tolist(), strict=True)), "grad_norm": float(grad_norm), "lr": float(lr)}
