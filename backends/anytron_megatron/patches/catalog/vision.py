"""Patches of vision models."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import BRIDGE, BRIDGE_VERSIONS, FIXES

DEEPSTACK = Patch(
    id="megatron.mcore-bridge-deepstack",
    target="mcore_bridge.model.mm_gpts.qwen3_vl:Qwen3VL_Vit._get_inputs_embeds",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "with several padded rows, deepstack features reach the wrong images (and fail with context parallelism); "
        "with sequence parallelism their gradient is divided by the tensor-parallel size"
    ),
    upstream="mcore_bridge/model/mm_gpts/qwen3_vl.py, _get_inputs_embeds, lines 137 to 160",
    remove_when="the tests of these three faults pass without this patch",
    replacement=f"{FIXES}.deepstack:number_features",
)
