"""Tiny language models of families beyond the kit's: configurations with the fields of published ``config.json`` files.

Each has the fields that the file named above it sets, with the same values, and only its sizes are cut, so that the
flags of the published model decide what is compared.
"""

from __future__ import annotations

from typing import Any

from anytron_conformance.tiny_models import TEXT

SIZES: dict[str, Any] = {
    **{name: size for name, size in TEXT.items() if name != "head_dim"},
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
}
HEADS = {"head_dim": TEXT["head_dim"]}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# Of more heads than is usual for these sizes: a score is zero where no head's is positive, and ties have no order.

GLM_MOE: dict[str, Any] = {
    **SIZES,
    **HEADS,
    **ROUTED,
    **ONE_GROUP,
    "attention_bias": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": None,
}

LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    # zai-org/GLM-4.5-Air
    "glm4_5_air": {"model_type": "glm4_moe", **GLM_MOE, "num_nextn_predict_layers": 1},
    # zai-org/GLM-4.5, GLM-4.6 and GLM-4.7
    "glm4_6": {
        "model_type": "glm4_moe",
        **GLM_MOE,
        "use_qk_norm": True,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    # openai/gpt-oss-20b, its weights unpacked; the window is shorter than the sequences
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        **HEADS,
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "initial_context_length": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "swiglu_limit": 7.0,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.9,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    # MiniMaxAI/MiniMax-M2
    "minimax_m2": {
        "model_type": "minimax_m2",
        **SIZES,
        **HEADS,
        "attn_type_list": [1, 1, 1, 1],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "num_mtp_modules": 3,
        "mtp_transformer_layers": 1,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
    },
    # Qwen/Qwen2-57B-A14B
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "sliding_window": 65536,
        "max_window_layers": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    # allenai/OLMoE-1B-7B-0924
    "olmoe": {
        "model_type": "olmoe",
        **SIZES,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": None,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    },
    # baidu/ERNIE-4.5-0.3B-PT
    "ernie4_5": {
        "model_type": "ernie4_5",
        **SIZES,
        **HEADS,
        "tie_word_embeddings": True,
        "use_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "rope_scaling": None,
    },
    # baidu/ERNIE-4.5-21B-A3B-PT
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **SIZES,
        "tie_word_embeddings": True,
        "use_bias": False,
        "use_rmsnorm": True,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_intermediate_size": 48,
        "moe_capacity": [4, 4, 4],
        "moe_gate": "topk",
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    # tencent/Hy3
    "hy_v3": {
        "model_type": "hy_v3",
        **SIZES,
        **HEADS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 48,
        "expert_hidden_dim": 48,
        "first_k_dense_replace": 1,
        "qk_norm": True,
        "route_norm": True,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
        "router_scaling_factor": 2.826,
        "enable_moe_fp32_combine": False,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    },
    # rednote-hilab/dots.llm1.inst
    "dots1": {
        "model_type": "dots1",
        **SIZES,
        **ROUTED,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "sliding_window": None,
        "max_window_layers": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000,
        "rope_scaling": None,
    },
    # internlm/internlm3-8b-instruct, without its rope_scaling of type dynamic, which is refused
    "internlm3": {
        "model_type": "internlm3",
        **SIZES,
        **HEADS,
        "bias": False,
        "qkv_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000000,
    },
    # XiaomiMiMo/MiMo-7B-RL, which names code that comes with it: Qwen2's classes, but for the prediction modules
    "mimo": {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModel": "modeling_mimo.MiMoModel",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
        **SIZES,
        **HEADS,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
    },
    # THUDM/GLM-4-9B-0414
    "glm4": {
        "model_type": "glm4",
        **SIZES,
        **HEADS,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
}
"""Name -> Hugging Face config, with ``model_type``."""
