"""Update one model: gradient buffers, optimizer and learning-rate schedule. Does not build models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from anytron.base.metric import is_maximum
from anytron_megatron.options import MegatronOptions
from anytron_megatron.training import parallel
from anytron_megatron.training.inspection import gather_gradients, inspect_update
from anytron_megatron.training.schedule import ModelChunk, forward_backward

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from megatron.core.transformer.module import MegatronModule
    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.config.running import OptimizerSection
    from anytron.config.schema import RunConfig
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import Inspection
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import Feature


@dataclass(frozen=True)
class DataParallel:
    """How data-parallel ranks work together on an update.

    Attributes:
        distributed_optimizer: Whether each rank keeps only its part of the optimizer's state.
        overlap_grad_reduce: Whether the ranks reduce gradients during the last micro-batch's backward pass, bucket by
            bucket.
        bucket_size: Number of parameters in a bucket; None = Megatron's choice.
    """

    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> DataParallel:
        """Read the settings from the run's configuration."""
        options = MegatronOptions.of(config)
        return cls(config.engine.distributed_optimizer, options.overlap_grad_reduce, options.ddp_bucket_size)


class TrainedModel:
    """A model that an optimizer updates.

    Args:
        chunks: The model on this rank, with its modules as they were built and all untrained parameters frozen.
        dtype: Element type of the parameters; with bfloat16 the optimizer keeps float32 copies.
        data_parallel: How the data-parallel ranks work together.
        steps: Training steps of the whole run.
        updates_per_step: Updates in each training step.

    Attributes:
        chunks: The same chunks, each module in its data-parallel wrapper.
        optimizer: Megatron's optimizer.
        updates: Number of completed updates.
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
        """The position in the learning-rate schedule."""
        return int(self._scheduler.num_steps)

    def continue_from(self, updates: int, schedule_steps: int) -> None:
        """Continue counting from these numbers, in this run's schedule, which may be longer than the saved run's."""
        self.updates = updates
        self._scheduler.num_steps = schedule_steps
        self._scheduler.step(increment=0)

    def update(
        self,
        micro_batches: Sequence[RaggedBatch],
        loss_fn: LossFunction,
        *features: Feature,
    ) -> Mapping[str, float] | None:
        """Do one optimizer update on this replica's micro-batches, the same number on every replica. A collective.

        If the loss or a gradient is not finite on any rank, nothing changes on any rank.

        Returns:
            If ``Topology.reports`` is True on this rank, the combined metrics of this replica's micro-batches,
            ``grad_norm``, ``lr`` and ``update/skipped``; None on other ranks.
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
        """Do the passes of an update and check every number; nothing is updated."""
        self.zero_grad()
        return inspect_update(self.chunks, micro_batches, self._preparer, loss_fn, *features)

    def optimizer_memory(self) -> Iterator[Tensor]:
        """Yield the tensors that only the optimizer uses: moments, and float32 copies of parameters."""
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
        """Yield the gradient buffers; an update does not need the previous update's values."""
        for chunk in self.chunks:
            for buffer in [*chunk.module.buffers, *chunk.module.expert_parallel_buffers]:
                yield buffer.grad_data

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""
        for chunk in self.chunks:
            chunk.module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _saved_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Copy what changes in the passes themselves: the expert biases of a mixture of experts."""
        return [(buffer, buffer.clone()) for module in self._modules for buffer in module.buffers()]


def wrap_for_training(chunks: list[MegatronModule], data_parallel: DataParallel) -> list[DistributedDataParallel]:
    """Add float32 gradient buffers, reduced over data-parallel ranks, to model chunks."""
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=data_parallel.distributed_optimizer,
        overlap_grad_reduce=data_parallel.overlap_grad_reduce,
        bucket_size=data_parallel.bucket_size,
        # It would raise on the rank that has the NaN, while the others wait for its gradients. step_if_finite() looks.
        check_for_nan_in_grad=False,
    )
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    if data_parallel.overlap_grad_reduce:
        # The schedules hold reductions back in all micro-batches but the last. Interleaved ones take a list.
        holds = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = holds if len(holds) > 1 else holds[0]
    return wrapped


@torch.no_grad()
def step_if_finite(optimizer: MegatronOptimizer) -> float:
    """Update the weights, or change nothing if a gradient on any rank is not finite. A collective.

    It does the parts of ``optimizer.step()`` (megatron/core/optimizer/optimizer.py), which checks gradients for float16
    only. The ranks communicate for the norm only.

    Returns:
        The global L2 norm of the gradients, the same on every rank; NaN or infinite if they are not finite.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if math.isfinite(norm):
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
    return norm


def build_optimizer(
    section: OptimizerSection,
    chunks: list[DistributedDataParallel],
    *,
    dtype: torch.dtype,
    data_parallel: DataParallel,
    steps: int,
    updates_per_step: int,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build the optimizer and its schedule for the chunks that :func:`wrap_for_training` returned.

    With bfloat16 parameters the optimizer keeps float32 copies. The learning rate decays over ``steps`` training steps.
    """
    config = OptimizerConfig(
        optimizer=section.name,
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        sgd_momentum=0.0,
        use_distributed_optimizer=data_parallel.distributed_optimizer,
        # 0 would skip the computation of the norm, which is reported at every step.
        clip_grad=section.clip_grad or float("inf"),
    )
    # Gloo groups of its own would only serve optimizer checkpoints on the host.
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.min_lr if section.schedule != "constant" else section.lr,
        # The schedule counts updates; the configuration counts training steps.
        lr_warmup_steps=section.warmup_steps * updates_per_step,
        lr_decay_steps=max(steps, section.warmup_steps + 1) * updates_per_step,
        lr_decay_style=section.schedule,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=steps * updates_per_step,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _restore(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in buffers:
        buffer.copy_(before)
