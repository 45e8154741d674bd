"""Patches of attention layers: multi-latent and sparse attention, rotary embeddings, Gated DeltaNet, and Mamba-2."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase, Supersession
from anytron_megatron.patches.catalog import BRIDGE, BRIDGE_VERSIONS, FIXES, MEGATRON

_MLA = "megatron.core.transformer.multi_latent_attention"

YARN_DEVICE = Patch(
    id="megatron.yarn-device",
    target="megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.15",
    reason=(
        "YaRN makes torch.device(torch.cuda.current_device()), and an integer is a device of torch's own accelerator, "
        "which a torch for the processor does not have"
    ),
    upstream="megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, with torch.device(device)",
    remove_when="Megatron makes a device of the type and the index",
    replacement=f"{FIXES}.rotary:build_on_the_host",
)
MLA_PACKED_ROTARY = Patch(
    id="megatron.mla-packed-rotary",
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires="<0.13",
    reason="packed queries of multi-latent attention are [T, 1, N, D]; the rotary embedding broadcasts over the 1",
    upstream="megatron-core 0.12.3, multi_latent_attention.py, qkv_up_proj_and_rope_apply; verl #6005",
    remove_when="megatron-core before 0.13 is not supported",
    replacement=f"{FIXES}.latent_attention:rotate_without_batch_dimension",
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
    replacement=f"{FIXES}.latent_attention:drop_batch_dimension",
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
    replacement=f"{FIXES}.latent_attention:rotate_at_padded_positions",
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
    replacement=f"{FIXES}.latent_attention:pad_values",
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
    replacement=f"{FIXES}.latent_attention:keep_query_projection",
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
    replacement=f"{FIXES}.latent_attention:share_whole_sequences",
)
SPARSE_ROTATION = Patch(
    id="megatron.sparse-attention-rotation",
    target="megatron.core.transformer.experimental_attention_variant.dsa:rotate_activation",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.16",
    reason=(
        "the indexer of DeepSeek sparse attention rotates with the CUDA extension fast_hadamard_transform, and "
        "bfloat16 only"
    ),
    upstream="megatron/core/transformer/experimental_attention_variant/dsa.py, rotate_activation",
    remove_when="Megatron rotates in torch where the extension is missing, in every element type",
    replacement=f"{FIXES}.sparse_attention:rotate_in_torch",
)

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
    replacement=f"{FIXES}.rotary:keep_table",
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
    replacement=f"{FIXES}.rotary:tell_context",
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
    replacement=f"{FIXES}.rotary:rotate_by_kernel",
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
    replacement=f"{FIXES}.rotary:rotate_in_layers",
)

_DELTA_NET = "mcore_bridge.model.modules.gated_delta_net"

DELTA_NET_PADDING = Patch(
    id="megatron.gated-delta-net-padding",
    target=f"{_DELTA_NET}:GatedDeltaNet.forward",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "the layer ignores the attention mask ('TODO: Deal with attention_mask'), so that padding enters its "
        "convolution and its recurrent state"
    ),
    upstream=(
        "https://github.com/modelscope/ms-swift/pull/9196; mcore_bridge/model/modules/gated_delta_net.py, line 215"
    ),
    remove_when="the layer takes a map of real tokens and leaves padding out",
    replacement=f"{FIXES}.delta_net:leave_out_padding",
)
DELTA_NET_CONTEXT = Patch(
    id="megatron.gated-delta-net-context",
    target="megatron.core.ssm.gated_delta_net:tensor_a2a_cp2hp",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires="<0.18",
    reason=(
        "with context parallelism mcore-bridge's layer imports functions that Megatron does not have yet, and would "
        "exchange each packed sequence on its own"
    ),
    upstream=(
        "megatron-core 0.18.0, megatron/core/ssm/gated_delta_net.py, tensor_a2a_cp2hp; "
        "mcore_bridge/model/modules/gated_delta_net.py, line 275"
    ),
    remove_when="megatron-core before 0.18 is not supported, and mcore-bridge exchanges a packed buffer in one piece",
    install=f"{FIXES}.delta_net:install_exchange",
)
DELTA_NET_GRADIENTS = Patch(
    id="megatron.gated-delta-net-gradients",
    target=f"{_DELTA_NET}:GatedDeltaNet.__init__",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "with tensor parallelism the input norm's gradient is tp times too large if sequence parallelism is on, and "
        "the output norm's covers one rank's heads only if it is off"
    ),
    upstream=(
        "mcore_bridge/model/modules/gated_delta_net.py, line 219: the sequence is gathered before the norm; "
        "megatron/core/distributed/finalize_model_grads.py, line 354: only q_layernorm and k_layernorm are summed"
    ),
    remove_when="mcore-bridge marks both parameters so that Megatron sums their gradients correctly",
    replacement=f"{FIXES}.delta_net:sum_partial_gradients",
)
DELTA_NET_KERNELS = Patch(
    id="megatron.gated-delta-net-kernels",
    target=f"{_DELTA_NET}:chunk_gated_delta_rule",
    phase=Phase.BEFORE_BUILD,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason="Gated DeltaNet layers compute with flash-linear-attention, which supports few devices",
    upstream=(
        "mcore_bridge/model/modules/gated_delta_net.py, line 20; "
        "megatron/core/ssm/gated_delta_net.py, line 104: ImportError without fla"
    ),
    remove_when="layers take their kernels from their module specs",
    install=f"{FIXES}.delta_net:install_kernels",
)
MAMBA_PADDING = Patch(
    id="megatron.mamba-padding",
    target="megatron.core.ssm.mamba_mixer:MambaMixer.forward",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.19",
    reason="the layer takes no mask, so that padding enters its convolution and its recurrent state",
    upstream="megatron/core/ssm/mamba_layer.py, line 117: 'Not used in MambaLayer'",
    remove_when="the layer takes a map of real tokens and leaves padding out",
    replacement=f"{FIXES}.delta_net:leave_out_padding",
)
MAMBA_KERNELS = Patch(
    id="megatron.mamba-kernels",
    target="megatron.core.ssm.mamba_mixer:MambaMixer._ssm_training",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.19",
    reason=(
        "Mamba layers compute with mamba-ssm, which supports few devices, and let packed sequences see their "
        "neighbours unless the caller gives seq_idx"
    ),
    upstream=(
        "megatron/core/ssm/mamba_mixer.py, lines 202 and 750; megatron/core/packed_seq_params.py, line 51; "
        "megatron/core/ssm/mamba_context_parallel.py, line 383: Transformer Engine orders packed sequences"
    ),
    remove_when="layers take their kernels from their module specs, and find sequences by cu_seqlens",
    install=f"{FIXES}.mamba:install_kernels",
)
