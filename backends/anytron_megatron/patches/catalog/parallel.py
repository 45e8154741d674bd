"""Patches of process groups, of their collectives, of sends between pipeline stages, and of recomputation."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog import FIXES, MEGATRON

ONE_RANK_GROUPS = Patch(
    id="megatron.one-rank-groups",
    target="megatron.core.parallel_state:create_group",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=MEGATRON,
    reason=(
        "Megatron makes about twenty groups of a single rank, which never communicate; over gloo each has three "
        "threads, one of which wakes up a hundred times a second"
    ),
    upstream="megatron/core/parallel_state.py, create_group; its arguments are the same from 0.12.3 to 0.19.2",
    remove_when="Megatron makes no groups of one rank, or torch starts no threads for them",
    replacement=f"{FIXES}.parallel:share_groups_of_one_rank",
)
PIPELINE_SENDS = Patch(
    id="megatron.pipeline-sends",
    target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    reason=(
        "an interleaved pipeline frees a tensor before it is sent: over gloo the next stage receives whatever is "
        "in that memory by then, most often on a busy machine"
    ),
    upstream="megatron/core/pipeline_parallel/schedules.py, deallocate_output_tensor after an asynchronous send",
    remove_when="the schedule frees a tensor only after it was sent",
    replacement=f"{FIXES}.parallel:send_aliases",
)


def _one_rank_collective(suffix: str, name: str) -> Patch:
    return Patch(
        id=f"megatron.one-rank-collectives.{suffix}",
        target=f"megatron.core.distributed.param_and_grad_buffer:{name}",
        phase=Phase.BEFORE_BUILD,
        package=MEGATRON,
        reason=(
            "the distributed optimizer of a single rank reduces and gathers buffers that are whole; over gloo that "
            "starts teams of OpenMP threads, after which no team of the process spins for its next operation"
        ),
        upstream="megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync and start_param_sync",
        remove_when="Megatron communicates only in groups of several ranks",
        replacement=f"{FIXES}.parallel:skip_for_one_rank",
        rebinds=False,  # torch's own function, which others call
    )


ONE_RANK_COLLECTIVES = (
    _one_rank_collective("reduce-gradients", "dist_reduce_scatter_func"),
    _one_rank_collective("gather-parameters", "dist_all_gather_func"),
)


def _recompute_scopes(suffix: str, target: str, function: str) -> Patch:
    return Patch(
        id=f"megatron.recompute-scopes{suffix}",
        target=target,
        phase=Phase.BEFORE_BUILD,
        package=MEGATRON,
        reason=(
            "autograd recomputes a layer later and on its own thread, where it would see the device state of "
            "another micro-batch, or none"
        ),
        upstream="verl util.py, preprocess_for_mindspeed: recomputed functions read globals of the process",
        remove_when="no device needs process-global state around a micro-batch",
        replacement=f"{FIXES}.parallel:{function}",
    )


RECOMPUTE_SCOPES = _recompute_scopes("", "megatron.core.tensor_parallel.random:checkpoint", "rescope_function")
RECOMPUTE_SCOPES_WITHOUT_OUTPUT = _recompute_scopes(
    ".without-output", "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint", "rescope_method"
)
RECOMPUTE_SCOPES_TRANSFORMER_ENGINE = _recompute_scopes(
    ".transformer-engine", "megatron.core.extensions.transformer_engine:te_checkpoint", "rescope_function"
)
