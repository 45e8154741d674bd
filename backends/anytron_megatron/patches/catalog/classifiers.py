"""Patches of models that classify sequences."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import BRIDGE, BRIDGE_VERSIONS, FIXES

SCORE_HEAD = Patch(
    id="megatron.mcore-bridge-score-head",
    target="mcore_bridge.bridge.gpt_bridge:GPTBridge._split_tp",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "the head of a classifier is filled up to a multiple of the tensor-parallel size as if it were a vocabulary, "
        "though each rank has all of it: one of a single label cannot be loaded on two ranks"
    ),
    upstream="mcore_bridge/bridge/gpt_bridge.py, lines 171 to 179 and 199: output_layer.weight counts as an embedding",
    remove_when="mcore-bridge loads a model of task_type='seq_cls' with num_labels=1 on two tensor-parallel ranks",
    replacement=f"{FIXES}.score_head:keep_whole",
)
