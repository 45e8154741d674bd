"""Megatron's optimizer and learning-rate schedule, from the run's configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from anytron.config.schema import OptimizerSection


def wrap_for_training(chunks: list[MegatronModule], *, distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """Give model chunks float32 gradient buffers that are reduced over data-parallel ranks."""
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        # It would raise on the rank that has the NaN, while the others wait for its gradients. step_if_finite() looks.
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]


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
    distributed_optimizer: bool,
    steps: int,
    updates_per_step: int,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build the optimizer and its schedule, for what :func:`wrap_for_training` returned.

    With bfloat16 parameters the optimizer keeps float32 copies; ``distributed_optimizer`` shards its state over
    data-parallel ranks. ``steps`` training steps are the length of the decay.
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
        use_distributed_optimizer=distributed_optimizer,
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
