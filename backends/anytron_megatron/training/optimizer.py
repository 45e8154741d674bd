"""Megatron's optimizer and learning-rate schedule, from the run's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from anytron.config.running import OptimizerSection
    from anytron.config.schema import RunConfig


@dataclass(frozen=True)
class DataParallel:
    """How data-parallel ranks work together on an update.

    Attributes:
        distributed_optimizer: They share the optimizer's state.
        overlap_grad_reduce: They reduce gradients during the last micro-batch's backward pass, bucket by bucket.
        bucket_size: Parameters of a bucket; None = Megatron's choice.
    """

    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> DataParallel:
        """Read it from the run's configuration."""
        options = MegatronOptions.of(config)
        return cls(config.engine.distributed_optimizer, options.overlap_grad_reduce, options.ddp_bucket_size)


def wrap_for_training(chunks: list[MegatronModule], data_parallel: DataParallel) -> list[DistributedDataParallel]:
    """Give model chunks float32 gradient buffers that are reduced over data-parallel ranks."""
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
    """Update the weights, unless a gradient of any rank is not finite: then weights and optimizer stay. A collective.

    This is ``optimizer.step()`` in its parts (megatron/core/optimizer/optimizer.py), which has such a condition for
    float16 only. The ranks need no word with each other beyond the norm, which they compute together.

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
    """Build the optimizer and its schedule, for what :func:`wrap_for_training` returned.

    With bfloat16 parameters the optimizer keeps float32 copies. ``steps`` training steps are the length of the decay.
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
