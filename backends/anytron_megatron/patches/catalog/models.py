"""Patches of parts of models: vision towers, routers of experts, heads of classifiers, and their optimizer."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog import BRIDGE, BRIDGE_VERSIONS, FIXES, MEGATRON

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
    replacement=f"{FIXES}.models:keep_whole",
)

OFFLOADED_OPTIMIZER = Patch(
    id="megatron.offloaded-optimizer",
    target="megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.__init__",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    reason=(
        "where the host is the device, Megatron cannot tell a weight from its copy on the host, and does not update "
        "weights whose optimizer state is offloaded, without an error"
    ),
    upstream="megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, which asks param.is_cuda of the host's copy",
    remove_when="HybridDeviceOptimizer does not ask the copy for its device",
    replacement=f"{FIXES}.models:refuse_offload_to_the_device",
)

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
    replacement=f"{FIXES}.models:number_features",
)

GATE_AND_UP = Patch(
    id="megatron.mcore-bridge-gate-and-up",
    target="mcore_bridge.bridge.gpt_bridge:GPTBridge._set_mlp_state",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "GLM-4 and GLM-4.1V are exported with gate_proj and up_proj, where files and transformers have gate_up_proj: "
        "no rollout engine can load them"
    ),
    upstream="mcore_bridge/bridge/gpt_bridge.py, _set_mlp_state: is_gate_up stays False in an export without experts",
    remove_when="an export of GLM-4 has the names of its checkpoint",
    replacement=f"{FIXES}.models:join_gate_and_up",
)

EXPERTS_ORIENTATION = Patch(
    id="megatron.mcore-bridge-experts-orientation",
    target="mcore_bridge.bridge.gpt_bridge:GPTBridge._set_moe_state",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "the experts of a Qwen3-VL-MoE that transformers 5 has written are read wrongly, without an error: in its "
        "files their weights are transposed"
    ),
    upstream="mcore_bridge/bridge/gpt_bridge.py, _get_need_transpose, lines 866 to 870, asks for no shape",
    remove_when="mcore-bridge compares the shapes of fused experts with the config's sizes before it transposes them",
    replacement=f"{FIXES}.models:read_either_orientation",
)

ROUTER_BIAS = Patch(
    id="megatron.router-biased-softmax",
    target="megatron.core.transformer.moe.router:topk_routing_with_score_function",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.16",
    reason="experts of ERNIE-4.5 are chosen by a softmax and a bias; Megatron ignores the bias with a softmax",
    upstream="megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function, lines 709 to 715: no bias",
    remove_when="Megatron's transformer config takes moe_router_enable_expert_bias with a softmax",
    replacement=f"{FIXES}.models:choose_by_biased_softmax",
)

ERNIE_BIAS = Patch(
    id="megatron.mcore-bridge-ernie-bias",
    target="mcore_bridge.bridge.gpt_bridge:GPTBridge._set_router",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason="the bias by which the routers of ERNIE-4.5 choose experts is neither read nor written",
    upstream="mcore_bridge/bridge/gpt_bridge.py, line 53: hf_expert_bias_key has one value for all families",
    remove_when="an export of ERNIE-4.5 with experts has moe_statics.e_score_correction_bias",
    replacement=f"{FIXES}.models:read_ernie_bias",
)

HEAD_SIZES = Patch(
    id="megatron.mcore-bridge-head-sizes",
    target="mcore_bridge:hf_to_mcore_config",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "Gemma 4's configuration cannot be read: mcore-bridge asks it for global_head_dim, which transformers keeps by "
        "layer, for head_dim, which transformers refuses to name where layers differ, and, of gemma4_unified, for "
        "enable_moe_block and hidden_size_per_layer_input, which that class lacks"
    ),
    upstream="mcore_bridge/model/mm_gpts/gemma4.py, lines 82 and 168 to 177; transformers, configuration_gemma4.py",
    remove_when="mcore-bridge reads text_config.per_layer_config",
    replacement=f"{FIXES}.gemma4:name_head_sizes",
)

MODALITIES = Patch(
    id="megatron.mcore-bridge-modalities",
    target="mcore_bridge.model.mm_gpts.gemma4:Gemma4TextGPTModel.extra_forward_keys",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason="Gemma 4 raises KeyError: 'mm_token_type_ids' for text without images",
    upstream="mcore_bridge/model/mm_gpt_model.py, line 105: kwargs[k]; its Gemma 4 itself does without the key",
    remove_when="Gemma 4 computes logits of a text without mm_token_type_ids",
    replacement=f"{FIXES}.gemma4:forget_modalities",
)

KEYS_AS_VALUES = Patch(
    id="megatron.mcore-bridge-keys-as-values",
    target="mcore_bridge.model.mm_gpts.gemma4:SplitAlongDim",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason="Gemma 4's layers whose keys are their values fail: queries and keys are split along the wrong dimension",
    upstream="mcore_bridge/model/mm_gpts/gemma4.py, line 327: SplitAlongDim(mixed_qkv, len(split_arg_list), ...)",
    remove_when="Gemma 4 with attention_k_eq_v computes logits",
    replacement=f"{FIXES}.gemma4:split_heads",
    rebinds=False,
)

LAYER_EMBEDDINGS = Patch(
    id="megatron.mcore-bridge-layer-embeddings",
    target="mcore_bridge.model.mm_gpts.gemma4:Gemma4TextGPTModel.__init__",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "with sequence parallelism the gradient of per_layer_projection_norm (Gemma 4 E2B and E4B) is summed over "
        "tensor-parallel ranks that each have all of it"
    ),
    upstream="mcore_bridge/model/mm_gpts/gemma4.py, per_layer_projection_norm: its input is gathered before it",
    remove_when="Gemma 4 E2B has the same gradients with TP2 as on one rank",
    replacement=f"{FIXES}.gemma4:count_layer_norm_once",
)

PLACES = Patch(
    id="megatron.mcore-bridge-places",
    target="mcore_bridge.model.mm_gpt_model:MultimodalGPTModel.forward",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "Gemma 4 and Muse Glimmer embed the numbers of images, videos and sound in a text as they are, where "
        "transformers embeds padding or token 0: log-probs differ, without an error"
    ),
    upstream=(
        "mcore_bridge/model/mm_gpt_model.py, _patch_word_embeddings: of these numbers only negative ones are replaced; "
        "transformers, modeling_gemma4.py, lines 2383 to 2387"
    ),
    remove_when="mcore-bridge's Gemma 4 embeds image_token_id as text_config.pad_token_id",
    replacement=f"{FIXES}.models:embed_places",
)

BLANK_IMAGE = Patch(
    id="megatron.mcore-bridge-blank-image",
    target="mcore_bridge.model.mm_gpts.llama4:Llama4Vit.get_inputs_embeds",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    requires=BRIDGE_VERSIONS,
    reason=(
        "a text without images runs Llama 4's tower over an image of 336 x 336 zeros, whatever its image_size: with "
        "another size it fails, and a frozen tower needs no image at all"
    ),
    upstream="mcore_bridge/model/mm_gpts/llama4.py, line 34: torch.zeros((1, 3, 336, 336))",
    remove_when="Llama 4 with a vision_config.image_size of 32 computes logits of a text",
    replacement=f"{FIXES}.models:embed_text_alone",
)

THINKER_SOUND = tuple(
    Patch(
        id=f"megatron.mcore-bridge-thinker-sound-{number}",
        target=f"mcore_bridge.model.mm_gpts.{tower}.get_audio_features",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package=BRIDGE,
        requires=BRIDGE_VERSIONS,
        reason=f"{title} computes nothing: its tower of sound asks transformers' thinker, which asks self.model",
        upstream=f"mcore_bridge/model/mm_gpts/{file}: model_cls is the thinker with its output layer, whose "
        "get_audio_features needs self.model in transformers 5.23",
        remove_when=f"{title} computes logits of a text",
        replacement=f"{FIXES}.models:hear_without_a_head",
    )
    for number, title, tower, file in (
        ("2-5", "Qwen2.5-Omni", "qwen:Qwen2_5Omni_Vit", "qwen.py, lines 84 and 116"),
        ("3", "Qwen3-Omni", "qwen3_omni:Qwen3Omni_Vit", "qwen3_omni.py, lines 29 and 66"),
    )
)

ROUTER_PADDING = Patch(
    id="megatron.router-padding",
    target="megatron.core.transformer.moe.router:TopKRouter.forward",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.16",
    reason=(
        "auxiliary losses and expert biases count padding: mcore-bridge's forward takes no padding mask, and its "
        "vision models drop unknown arguments (on later pipeline stages all of them)"
    ),
    upstream="mcore_bridge/model/gpt_model.py, forward; mcore_bridge/model/mm_gpt_model.py, line 125: kwargs = {}",
    remove_when="mcore-bridge's models take padding_mask, as Megatron's own GPTModel.forward does",
    replacement=f"{FIXES}.models:mask_padding",
)
ROUTER_PRODUCT = Patch(
    id="megatron.router-product",
    target="megatron.core.transformer.moe.moe_utils:router_gating_linear",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.13",
    reason=(
        "routers multiply by themselves: where kernels must be company-invariant, a token's experts would depend on "
        "the other tokens of the micro-batch"
    ),
    upstream="megatron-core 0.16.1, moe_utils.py, lines 1192 to 1200",
    remove_when="Megatron's routers multiply with a layer of Transformer Engine",
    replacement=f"{FIXES}.invariance:multiply_with_the_kernel",
)
COMPANY = (
    "where kernels must be company-invariant, its vectorised sigmoid computes the last elements by another formula"
)
ROUTER_SCORES = Patch(
    id="megatron.router-scores",
    target="megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.13",
    reason=COMPANY,
    upstream="megatron-core 0.16.1, moe_utils.py, line 717; torch's loops on the host",
    remove_when="torch's vectorised functions compute each element by one formula",
    replacement=f"{FIXES}.invariance:compute_alone",
)
SHARED_EXPERTS_GATE = Patch(
    id="megatron.shared-experts-gate",
    target="megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.13",
    reason=f"the gate of shared experts multiplies by itself; {COMPANY}",
    upstream="megatron-core 0.16.1, shared_experts.py, forward",
    remove_when="as megatron.router-product and megatron.router-scores",
    replacement=f"{FIXES}.invariance:compute_alone",
)
INVARIANCE = (ROUTER_PRODUCT, ROUTER_SCORES, SHARED_EXPERTS_GATE)
"""What portable modules do not multiply."""
ROUTER_GEMM = Patch(
    id="megatron.router-gemm",
    target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
    phase=Phase.BEFORE_BUILD,
    package=MEGATRON,
    requires=">=0.13,<0.17",
    reason="without Transformer Engine the router raises NameError: name 'te_general_gemm' is not defined",
    upstream="megatron-core 0.16.1, moe_utils.py, lines 16 to 39 and 1192; 0.19 defines it as None",
    remove_when="megatron-core before 0.17 is not supported",
    install=f"{FIXES}.models:define_missing_gemm",
)
