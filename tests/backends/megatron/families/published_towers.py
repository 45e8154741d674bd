"""Tiny vision-language models of families that get no images here: their towers stay as they are.

Their fields are nested as transformers 5 nests them.
"""

from __future__ import annotations

from typing import Any

from anytron_conformance.tiny_models import IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START
from tests.backends.megatron.families.published_text import HEADS, SIZES

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
_UNIFIED_ABSENT = (
    "enable_moe_block",
    "hidden_size_per_layer_input",
    "moe_intermediate_size",
    "num_experts",
    "top_k_experts",
    "vocab_size_per_layer_input",
)
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
_LLAMA = {
    **SIZES,
    **HEADS,
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
}
_LLAMA_TOWER = {
    "model_type": "llama4_vision_model",
    "attention_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "image_size": 32,
    "intermediate_size": 128,
    "multi_modal_projector_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 2,
    "patch_size": 8,
    "pixel_shuffle_ratio": 0.5,
    "projector_dropout": 0.0,
    "projector_input_dim": 48,
    "projector_output_dim": 48,
    "rope_theta": 10000,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "vision_output_dim": 48,
}
_LLAMA_TOKENS = {
    "boi_token_index": VISION_START,
    "eoi_token_index": VISION_END,
    "image_token_index": IMAGE_TOKEN,
    "tie_word_embeddings": False,
}

IDLE_TOWERS: dict[str, dict[str, Any]] = {
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
    # google/gemma-4-12B-it: no towers, but projections of patches of images and of frames of sound
    "gemma4_12b": {
        "model_type": "gemma4_unified",
        "text_config": {
            **{name: value for name, value in _GEMMA_LARGE.items() if name not in _UNIFIED_ABSENT},
            "model_type": "gemma4_unified_text",
            "num_global_key_value_heads": 1,
            "num_key_value_heads": 2,
        },
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "mm_embed_dim": 64,
            "mm_posemb_size": 8,
            "output_proj_dims": 64,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "rms_norm_eps": 1e-6,
        },
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 32, "rms_norm_eps": 1e-6},
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
    # meta-llama/Llama-4-Scout-17B-16E-Instruct
    "llama4_scout": {
        "model_type": "llama4",
        "text_config": {
            **_LLAMA,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            },
            "use_qk_norm": True,
        },
        "vision_config": _LLAMA_TOWER,
        **_LLAMA_TOKENS,
    },
    # meta-llama/Llama-4-Maverick-17B-128E-Instruct
    "llama4_maverick": {
        "model_type": "llama4",
        "text_config": {
            **_LLAMA,
            "interleave_moe_layer_step": 2,
            "rope_scaling": None,
            "use_qk_norm": False,
        },
        "vision_config": _LLAMA_TOWER,
        **_LLAMA_TOKENS,
    },
    # meta-models/Muse-Glimmer-30B; the window is shorter than the sequences
    "muse_glimmer": {
        "model_type": "muse_glimmer",
        "text_config": {
            **{name: value for name, value in SIZES.items() if name != "hidden_act"},
            **HEADS,
            "model_type": "muse_glimmer_text",
            "attention_bias": False,
            "final_logit_softcapping": 20.0,
            "hidden_activation": "silu",
            "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0],
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "output_multiplier": 0.19611613513818404,
            "post_norm_eps": 1e-8,
            "qk_scale_factor": 3.87,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": 4,
        },
        "vision_config": {
            "model_type": "muse_glimmer_vision",
            "hidden_act": "gelu",
            "hidden_size": 32,
            "intermediate_size": 64,
            "layer_norm_eps": 1e-5,
            "layer_types": ["window_attention", "full_attention"],
            "max_position_embeddings": 16,
            "merge_size": 2,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 4,
            "patch_temporal": 2,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
        },
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "out_hidden_size": 128,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 48,
    },
}
"""Name -> Hugging Face config, with ``model_type``."""
