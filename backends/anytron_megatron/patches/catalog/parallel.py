"""Patches of process groups and of the sends between pipeline stages."""

from __future__ import annotations

from anytron.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import FIXES, MEGATRON

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
    replacement=f"{FIXES}.one_rank_groups:share_groups_of_one_rank",
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
    replacement=f"{FIXES}.pipeline_sends:send_aliases",
)
