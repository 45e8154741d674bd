"""Tiny vision-language models of families beyond the kit's, as those of :mod:`published_text`.

Their fields are nested as transformers 5 nests them; Qwen2-VL's published file has those of the text on top.
"""

from __future__ import annotations

from typing import Any

from anytron_conformance.tiny_models import DELTA_NET, IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START
from tests.backends.megatron.families.published_text import GLM_MOE, HEADS, SIZES

_VISION_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_GLM_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "image_start_token_id": VISION_START,
    "image_end_token_id": VISION_END,
    "video_start_token_id": 118,
    "video_end_token_id": 119,
}
_PATCHES = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_TOWER = {**_PATCHES, "intermediate_size": 64, "out_hidden_size": 64, "temporal_patch_size": 2}
_GLM_TOWER = {
    **_TOWER,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "image_size": 32,
    "in_channels": 3,
    "rms_norm_eps": 1e-5,
}

_TILES = {
    "image_token_id": IMAGE_TOKEN,
    "image_seq_length": 4,
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "vision_config": {
        "model_type": "internvl_vision",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 32,
        "image_size": [16, 16],
        "intermediate_size": 64,
        "layer_norm_eps": 1e-6,
        "layer_scale_init_value": 0.1,
        "norm_type": "layer_norm",
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_hidden_layers": 2,
        "patch_size": [4, 4],
        "projection_dropout": 0.0,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "tie_word_embeddings": False,
}
_QWEN = {
    **SIZES,
    "max_window_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}

_GEMMA = {
    **{name: value for name, value in SIZES.items() if name != "hidden_act"},
    **HEADS,
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "moe_intermediate_size": None,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 4,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 128,
}
_GEMMA_LARGE = {
    **_GEMMA,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "num_key_value_heads": 4,
    "use_bidirectional_attention": "vision",
}
_GEMMA_TOWER = {
    "model_type": "gemma4_vision",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "standardize": True,
    "use_clipped_linears": False,
}
_GEMMA_AUDIO = {
    "model_type": "gemma4_audio",
    "conv_kernel_size": 5,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "output_proj_dims": 48,
    "subsampling_conv_channels": [16, 8],
    "use_clipped_linears": True,
}
_GEMMA_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "boi_token_id": VISION_START,
    "eoi_token_id": VISION_END,
    "audio_token_id": 124,
    "boa_token_id": 125,
    "eoa_token_index": 126,
    "tie_word_embeddings": True,
}

_MINICPM_TOWER = {
    "model_type": "minicpmv4_6_vision",
    "attention_dropout": 0.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "image_size": 32,
    "insert_layer_id": 1,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-6,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 3,
    "patch_size": 4,
    "window_kernel_size": [2, 2],
}

VISION_MODELS: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3.5-35B-A3B
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **SIZES,
            **HEADS,
            **DELTA_NET,
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
            "attention_bias": False,
            "full_attention_interval": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "mtp_num_hidden_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
        },
        "vision_config": {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
        **_VISION_TOKENS,
        "tie_word_embeddings": False,
    },
    # Qwen/Qwen2-VL-2B-Instruct
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "text_config": {
            **SIZES,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 4,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "mlp_ratio": 4,
            "num_heads": 2,
            "in_chans": 3,
            "patch_size": 4,
            "spatial_patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_VISION_TOKENS,
        "tie_word_embeddings": True,
    },
    # Qwen/Qwen3-VL-30B-A3B-Instruct
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **SIZES,
            **HEADS,
            "model_type": "qwen3_vl_moe_text",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
            "rope_theta": 5000000,
        },
        "vision_config": {
            **_TOWER,
            "model_type": "qwen3_vl_moe",
            "deepstack_visual_indexes": [0, 1],
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "num_position_embeddings": 16,
        },
        **_VISION_TOKENS,
        "tie_word_embeddings": False,
    },
    # THUDM/GLM-4.1V-9B-Thinking
    "glm4v": {
        "model_type": "glm4v",
        "text_config": {
            **SIZES,
            "model_type": "glm4v_text",
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_GLM_TOWER, "model_type": "glm4v"},
        **_GLM_TOKENS,
        "tie_word_embeddings": False,
    },
    # zai-org/GLM-4.5V
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        "text_config": {
            **GLM_MOE,
            "model_type": "glm4v_moe_text",
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_GLM_TOWER, "model_type": "glm4v_moe"},
        **_GLM_TOKENS,
        "tie_word_embeddings": False,
    },
    # OpenGVLab/InternVL3_5-8B-HF
    "internvl3_5": {
        "model_type": "internvl",
        "text_config": {"model_type": "qwen3", **_QWEN, **HEADS, "attention_bias": False},
        **_TILES,
    },
    # OpenGVLab/InternVL3_5-30B-A3B-HF
    "internvl3_5_moe": {
        "model_type": "internvl",
        "text_config": {
            "model_type": "qwen3_moe",
            **_QWEN,
            **HEADS,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
        **_TILES,
    },
    # OpenGVLab/InternVL3-8B-hf, without its rope_scaling of type dynamic
    "internvl3": {"model_type": "internvl", "text_config": {"model_type": "qwen2", **_QWEN}, **_TILES},
    # google/gemma-4-31B-it; the window is shorter than the sequences
    "gemma4_31b": {
        "model_type": "gemma4",
        "text_config": _GEMMA_LARGE,
        "vision_config": _GEMMA_TOWER,
        "audio_config": None,
        **_GEMMA_TOKENS,
    },
    # google/gemma-4-26B-A4B-it
    "gemma4_26b": {
        "model_type": "gemma4",
        "text_config": {
            **_GEMMA_LARGE,
            "enable_moe_block": True,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "top_k_experts": 2,
        },
        "vision_config": _GEMMA_TOWER,
        "audio_config": None,
        **_GEMMA_TOKENS,
    },
    # google/gemma-4-E2B-it
    "gemma4_e2b": {
        "model_type": "gemma4",
        "text_config": {
            **_GEMMA,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        "vision_config": {**_GEMMA_TOWER, "standardize": False, "use_clipped_linears": True},
        "audio_config": _GEMMA_AUDIO,
        **_GEMMA_TOKENS,
    },
    # openbmb/MiniCPM-V-4.6, which has as many heads of keys as of values; its rope_parameters have no mrope_section
    "minicpmv4_6": {
        "model_type": "minicpmv4_6",
        "text_config": {
            **SIZES,
            **HEADS,
            **DELTA_NET,
            "model_type": "qwen3_5_text",
            "attention_bias": False,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
            "linear_num_key_heads": 4,
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
        "vision_config": _MINICPM_TOWER,
        "drop_vision_last_layer": False,
        "image_size": 32,
        "image_token_id": IMAGE_TOKEN,
        "insert_layer_id": 1,
        "merge_kernel_size": [2, 2],
        "merger_times": 1,
        "patch_size": 4,
        "tie_word_embeddings": True,
        "video_token_id": VIDEO_TOKEN,
    },
}
"""Name -> Hugging Face config, with ``model_type``."""
