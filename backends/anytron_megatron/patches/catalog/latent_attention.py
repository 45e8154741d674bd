"""Patches of multi-latent attention (MLA)."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase, Supersession
from anytron_megatron.patches.catalog.packages import BRIDGE, BRIDGE_VERSIONS, FIXES, MEGATRON

_MLA = "megatron.core.transformer.multi_latent_attention"

MLA_PACKED_ROTARY = Patch(
    id="megatron.mla-packed-rotary",
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires="<0.13",
    reason="packed queries of multi-latent attention are [T, 1, N, D]; the rotary embedding broadcasts over the 1",
    upstream="megatron-core 0.12.3, multi_latent_attention.py, qkv_up_proj_and_rope_apply; verl #6005",
    remove_when="megatron-core before 0.13 is not supported",
    replacement=f"{FIXES}.mla_packing:rotate_without_batch_dimension",
)
MLA_PACKED_QKV = Patch(
    id="megatron.mla-packed-qkv",
    target=f"{_MLA}:MLASelfAttention.get_query_key_value_tensors",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires="<0.13",
    reason="with packed sequences it returns [T, 1, N, D], and thd kernels take [T, N, D]",
    upstream="megatron-core 0.12.3, multi_latent_attention.py; verl #6005",
    remove_when="megatron-core before 0.13 is not supported",
    replacement=f"{FIXES}.mla_packing:drop_batch_dimension",
)
MLA_PADDED_POSITIONS = Patch(
    id="megatron.mla-padded-positions",
    target=f"{_MLA}:MLASelfAttention.get_query_key_value_tensors",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires="<0.14",
    reason="it splits a packed buffer by the real lengths, although sequences start at the padded ones",
    upstream="megatron-core 0.14.0, multi_latent_attention.py, line 511: 'if ... cu_seqlens_q_padded is not None'",
    remove_when="megatron-core before 0.14 is not supported",
    replacement=f"{FIXES}.mla_packing:rotate_at_padded_positions",
)
MLA_VALUES = Patch(
    id="megatron.mla-values",
    target=f"{_MLA}:MultiLatentAttention.forward",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    # 0.17.0 and 0.17.1 were released without #3003, which the branch of 0.16 got after 0.16.1, and 0.18.0 has.
    requires="<0.18,!=0.16.2",
    reason="packed attention kernels (Transformer Engine's, MindSpeed's TND) need values as wide as queries",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/3003, verl #6005",
    remove_when="megatron-core before 0.18 is not supported",
    replacement=f"{FIXES}.mla_values:pad_values",
    superseded_by=(
        Supersession(
            target="mcore_bridge.model.modules.multi_latent_attention:MLASelfAttention.forward",
            package=BRIDGE,
            requires=BRIDGE_VERSIONS,
            reason="mcore-bridge's models use this class, whose own forward pads values",
        ),
    ),
)
MLA_QUERY_NORM = Patch(
    id="megatron.mla-query-norm",
    target="megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._mla_fused_linear_or_default",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.19",
    reason="where queries are not compressed (q_lora_rank is None), they get a norm that the model does not have",
    upstream="megatron-core 0.19.2, mla_qk_norm_config.py, _resolve_mla_qk_layernorm: linear_q_proj",
    remove_when="megatron-core takes the projection that the layer's spec names",
    replacement=f"{FIXES}.mla_query_norm:keep_query_projection",
)
MLA_ROTARY_KEY = Patch(
    id="megatron.mcore-bridge-mla-rotary-key",
    target="mcore_bridge.model.modules.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "with tensor parallelism it gathers the rotary key as if each rank had a part of the sequence; without "
        "sequence_parallel each rank has all of it, and the sizes do not match"
    ),
    upstream="mcore_bridge/model/modules/multi_latent_attention.py, line 80; Megatron-LM #6839 for the gradient",
    remove_when="mcore-bridge asks for sequence_parallel before it gathers, and sums the gradient where it does not",
    replacement=f"{FIXES}.mla_rotary_key:share_whole_sequences",
)
