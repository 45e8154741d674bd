"""Update one model: gradient buffers, optimizer and learning-rate schedule. Does not build models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from anytron.base.metric import is_maximum
from anytron_megatron.training import parallel
from anytron_megatron.training.inspection import gather_gradients, inspect_update
from anytron_megatron.training.optimizer import build_optimizer, step_if_finite, wrap_for_training
from anytron_megatron.training.schedule import ModelChunk, forward_backward

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.config.running import OptimizerSection
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import Inspection
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.optimizer import DataParallel
    from anytron_megatron.training.schedule import Feature


class TrainedModel:
    """A model that an optimizer updates.

    Args:
        chunks: The model on this rank, its modules as they were built, with what is not to be trained frozen.
        dtype: Element type of the parameters; with bfloat16 the optimizer keeps float32 copies.
        data_parallel: How replicas work together.
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
        dtype: torch.dtype,
        data_parallel: DataParallel,
        steps: int,
        updates_per_step: int,
    ) -> None:
        self._modules = [chunk.module for chunk in chunks]
        wrapped = wrap_for_training(self._modules, data_parallel)
        self.chunks = [ModelChunk(module, chunk.head) for module, chunk in zip(wrapped, chunks, strict=True)]
        self.updates = 0
        self._preparer = preparer
        self.optimizer, self._scheduler = build_optimizer(
            optimizer,
            wrapped,
            dtype=dtype,
            data_parallel=data_parallel,
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

        If the loss or a gradient is not finite on any rank, nothing changes on all of them.

        Returns:
            On reporting ranks: the parts' metrics, joined, ``grad_norm``, ``lr`` and ``update/skipped``. None
            elsewhere.
        """
        buffers = self._saved_buffers()
        self.zero_grad()
        parts = forward_backward(self.chunks, micro_batches, self._preparer, loss_fn, *features)
        grad_norm = step_if_finite(self.optimizer)
        skipped = not math.isfinite(grad_norm)
        lr = self._scheduler.get_lr(self.optimizer.param_groups[0])
        if skipped:
            _restore(buffers)
        else:
            self._scheduler.step(increment=1)
            self.updates += 1
        if not parallel.topology().reports:
            return None
        names = list(parts[0])
        values = torch.stack([torch.stack([part[name].detach().float() for name in names]) for part in parts])
        largest = torch.tensor([is_maximum(name) for name in names], device=values.device)
        whole = torch.where(largest, values.amax(0), values.sum(0))
        same = {"grad_norm": grad_norm, "lr": float(lr), "update/skipped": float(skipped)}
        return {**dict(zip(names, whole.tolist(), strict=True)), **same}

    def compute_gradients(
        self, micro_batches: Sequence[RaggedBatch], loss_fn: LossFunction, *features: Feature
    ) -> None:
        """Leave a loss's gradients in ``main_grad``, whole on every replica; nothing is updated. A collective."""
        buffers = self._saved_buffers()
        self.zero_grad()
        forward_backward(self.chunks, micro_batches, self._preparer, loss_fn, *features)
        _restore(buffers)
        gather_gradients([chunk.module for chunk in self.chunks])

    def inspect(self, micro_batches: Sequence[RaggedBatch], loss_fn: LossFunction, *features: Feature) -> Inspection:
        """Do the passes of an update and look at every number; nothing is updated."""
        self.zero_grad()
        return inspect_update(self.chunks, micro_batches, self._preparer, loss_fn, *features)

    def optimizer_memory(self) -> Iterator[Tensor]:
        """Yield the tensors that are the optimizer's alone: moments, and float32 copies of parameters."""
        of_model = {
            parameter.untyped_storage().data_ptr() for module in self._modules for parameter in module.parameters()
        }
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if getattr(part, "is_stub_optimizer", False):
                continue
            inner = part.optimizer
            held = [
                value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)
            ]
            held += [parameter for group in inner.param_groups for parameter in group["params"]]
            yield from (one for one in held if one.untyped_storage().data_ptr() not in of_model)

    def gradient_memory(self) -> Iterator[Tensor]:
        """Yield the gradient buffers, whose values no update needs of the one before."""
        for chunk in self.chunks:
            for buffer in [*chunk.module.buffers, *chunk.module.expert_parallel_buffers]:
                yield buffer.grad_data

    def zero_grad(self) -> None:
        """Empty the gradient buffers."""
        for chunk in self.chunks:
            chunk.module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _saved_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Copy what changes in the passes themselves: the expert biases of a mixture of experts."""
        return [(buffer, buffer.clone()) for module in self._modules for buffer in module.buffers()]


def _restore(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in buffers:
        buffer.copy_(before)
