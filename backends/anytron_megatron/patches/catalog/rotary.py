"""Patches of rotary embeddings."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import BRIDGE, BRIDGE_VERSIONS, FIXES, MEGATRON

ROPE_TABLE = Patch(
    id="megatron.mcore-bridge-rope-table",
    target="mcore_bridge.model.rope:get_rope_inv_freq",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "the function overwrites transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS['default'] with one that "
        "reads config.rope_theta; Hugging Face models made later in this process fail"
    ),
    upstream="mcore_bridge/model/rope.py, line 115",
    remove_when="mcore-bridge keeps its own table",
    replacement=f"{FIXES}.rope_table:keep_table",
)
CACHED_ROTARY = Patch(
    id="megatron.mcore-bridge-cached-rotary",
    target="mcore_bridge.model.gpt_model:GPTModel._preprocess",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "generation with a cache of keys fails at its second token: rotary embeddings are made for the tokens of a "
        "step, as if there were no cache"
    ),
    upstream="mcore_bridge/model/gpt_model.py, line 187: _get_rotary_pos_emb is called without inference_context",
    remove_when="mcore-bridge passes inference_context on, as Megatron's own GPTModel does",
    replacement=f"{FIXES}.cached_rotary:tell_context",
)
ROTARY_KERNEL = Patch(
    id="megatron.rotary-kernel",
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    reason=(
        "Megatron rotates queries and keys in torch unless apply_rope_fusion is set, which takes a table of positions "
        "and not each token's angles; the platform's kernel takes those"
    ),
    upstream="megatron/core/models/common/embeddings/rope_utils.py, apply_rotary_pos_emb",
    remove_when="Megatron's fused rotary embeddings take the angles of each token",
    replacement=f"{FIXES}.rotary_kernel:rotate_by_kernel",
)
ROTARY_KERNEL_IN_LAYERS = Patch(
    id="megatron.mcore-bridge-rotary-kernel",
    target="mcore_bridge.model.modules.transformer_layer:TransformerLayer._patch_apply_rotary_pos_emb",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason="its layers replace Megatron's function by their own, in torch, while they compute",
    upstream="mcore_bridge/model/modules/transformer_layer.py, line 243",
    remove_when="mcore-bridge leaves the function alone where attention_scaling is 1",
    replacement=f"{FIXES}.rotary_kernel:rotate_in_layers",
)
