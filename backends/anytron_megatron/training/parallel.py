"""Bring up torch.distributed and Megatron's process groups for this rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from anytron.device.patches import Phase
from anytron.sequences.layout import ContextShard
from anytron.workers.engines.training_engine import Topology

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.base.traits import ParallelSizes
    from anytron.device.runtime import DeviceRuntime
    from anytron.device.stack import DeviceStack


def join(
    stack: DeviceStack, sizes: ParallelSizes, *, seed: int, timeout_s: float, init_method: str = "env://"
) -> DeviceRuntime:
    """Connect this rank with the others; return its device. Patches are applied before and after connecting.

    Call :meth:`anytron.device.stack.DeviceStack.prepare` first. The arguments are as for :func:`initialize`.
    """
    runtime = stack.platform.runtime()
    stack.apply_phase(Phase.BEFORE_PARALLEL_INIT)
    initialize(runtime, sizes, seed=seed, timeout_s=timeout_s, init_method=init_method)
    stack.apply_phase(Phase.BEFORE_BUILD)
    return runtime


def initialize(
    runtime: DeviceRuntime, sizes: ParallelSizes, *, seed: int, timeout_s: float, init_method: str = "env://"
) -> None:
    """Join the process group at ``init_method``, and split it by ``sizes``.

    Reads ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; without them, this rank is the only one. A collective that takes
    longer than ``timeout_s`` is an error.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    assert sizes.model * sizes.data == world_size  # the executor starts RunConfig.parallel.world_size ranks
    runtime.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    meeting: dict[str, Any] = {"init_method": init_method}
    if "RANK" not in os.environ:
        meeting = {"store": dist.HashStore()}  # type: ignore[attr-defined]  # of torch's C++
    dist.init_process_group(
        runtime.communication_backend,
        rank=int(os.environ.get("RANK", "0")),
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        **meeting,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        create_gloo_process_groups=False,  # only optimizer checkpoints on the host would use them
    )
    seed_generators(seed)


def seed_generators(seed: int) -> None:
    """Seed every generator of this rank.

    Each pipeline stage has another seed, as in Megatron (megatron/training/initialize.py, ``_set_random_seed``).
    """
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)


def context_shard() -> ContextShard:
    """Describe the part of each sequence that this rank holds (Megatron's zigzag)."""
    return ContextShard(
        size=parallel_state.get_context_parallel_world_size(),
        rank=parallel_state.get_context_parallel_rank(),
        group=parallel_state.get_context_parallel_group(),
    )


def topology() -> Topology:
    """Return the place of this rank among the data-parallel replicas of the model."""
    return Topology(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        reports=parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0,
    )


def tell_replica(values: Tensor) -> None:
    """Broadcast values from the rank whose ``Topology.reports`` is True to all ranks of its replica, in place."""
    group = parallel_state.get_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)  # tensor-parallel ranks of a stage stand together
    if len(ranks) > 1:
        dist.broadcast(values, ranks[-parallel_state.get_tensor_model_parallel_world_size()], group=group)


def any_replica(value: bool, device: torch.device) -> bool:
    """Whether a condition holds on any data-parallel replica. A collective."""
    found = torch.tensor(int(value), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
    return bool(found)


def destroy() -> None:
    """Leave all process groups."""
    parallel_state.destroy_model_parallel()
    # megatron-core 0.12.1 leaves this behind: the next engine would take this rank for a member of a group that does
    # not exist any more (is_rank_in_position_embedding_group in finalize_model_grads.py). 0.16.1 resets it.
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
    dist.destroy_process_group()
