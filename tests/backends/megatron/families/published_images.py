"""Tiny vision-language models of families beyond the kit's that take images, as those of :mod:`published_text`.

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
}
"""Name -> Hugging Face config, with ``model_type``."""
