"""Tiny models of the Omni families: thinkers of text, images and sound, and talkers, as :mod:`published_images`.

Token numbers stand in ``thinker_config``. A talker is never built here; its tensors must be kept.
"""

from __future__ import annotations

from typing import Any

from anytron_conformance.tiny_models import IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START
from tests.backends.megatron.families.published_text import HEADS, SIZES

AUDIO_TOKEN, AUDIO_START, AUDIO_END = 124, 125, 126

_SOUND = {
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "attention_dropout": 0.0,
    "d_model": 32,
    "dropout": 0.0,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "encoder_layers": 2,
    "max_source_positions": 64,
    "num_mel_bins": 128,  # mcore-bridge makes silence of 128
    "output_dim": 64,
    "scale_embedding": False,
}
_PATCHES = {
    "depth": 2,
    "hidden_size": 32,
    "in_channels": 3,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_SMALL = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}

OMNI_MODELS: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3-Omni-30B-A3B-Instruct
    "qwen3_omni_moe": {
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": True,
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "audio_token_id": AUDIO_TOKEN,
            "audio_start_token_id": AUDIO_START,
            "audio_end_token_id": AUDIO_END,
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": VIDEO_TOKEN,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "position_id_per_seconds": 13,
            "audio_config": {
                **_SOUND,
                "model_type": "qwen3_omni_moe_audio_encoder",
                "conv_chunksize": 500,
                "downsample_hidden_size": 8,
                "n_window": 50,
                "n_window_infer": 800,
            },
            "text_config": {
                **SIZES,
                **HEADS,
                "model_type": "qwen3_omni_moe_text",
                "attention_bias": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": 48,
                "norm_topk_prob": True,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "rms_norm_eps": 1e-6,
                "rope_scaling": {
                    "interleaved": True,
                    "mrope_interleaved": True,
                    "mrope_section": [4, 2, 2],
                    "rope_type": "default",
                    "type": "default",
                },
                "rope_theta": 1000000,
                "shared_expert_intermediate_size": 0,
                "sliding_window": None,
                "use_sliding_window": False,
            },
            "vision_config": {
                **_PATCHES,
                "model_type": "qwen3_omni_moe_vision_encoder",
                "deepstack_visual_indexes": [0],
                "hidden_act": "gelu_pytorch_tanh",
                "num_position_embeddings": 16,
                "out_hidden_size": 64,
            },
        },
        "talker_config": {
            "accept_hidden_layer": 1,
            "num_code_groups": 4,
            "spatial_merge_size": 2,
            "thinker_hidden_size": 64,
            "text_config": {
                **_SMALL,
                "model_type": "qwen3_omni_moe_talker_text",
                "moe_intermediate_size": 16,
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "shared_expert_intermediate_size": 16,
            },
            "code_predictor_config": {
                **_SMALL,
                "model_type": "qwen3_omni_moe_talker_code_predictor",
                "num_code_groups": 4,
            },
        },
        "code2wav_config": {
            "codebook_size": 16,
            "decoder_dim": 16,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "num_quantizers": 4,
            "upsample_rates": [2],
            "upsampling_ratios": [2],
        },
    },
    # Qwen/Qwen2.5-Omni-7B
    "qwen2_5_omni": {
        "model_type": "qwen2_5_omni",
        "enable_audio_output": True,
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "audio_token_index": AUDIO_TOKEN,
            "audio_start_token_id": AUDIO_START,
            "audio_end_token_id": AUDIO_END,
            "image_token_index": IMAGE_TOKEN,
            "video_token_index": VIDEO_TOKEN,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "position_id_per_seconds": 25,
            "seconds_per_chunk": 2,
            "audio_config": {**_SOUND, "model_type": "qwen2_5_omni_audio_encoder", "n_window": 100},
            "text_config": {
                **SIZES,
                "model_type": "qwen2_5_omni_text",
                "max_window_layers": 4,
                "rms_norm_eps": 1e-6,
                "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default", "type": "default"},
                "rope_theta": 1000000.0,
                "sliding_window": 32768,
                "use_sliding_window": False,
            },
            "vision_config": {
                **_PATCHES,
                "model_type": "qwen2_5_omni_vision_encoder",
                "fullatt_block_indexes": [1],
                "hidden_act": "silu",
                "out_hidden_size": 64,
                "window_size": 16,
            },
        },
        "talker_config": {**_SMALL, "model_type": "qwen2_5_omni_talker", "embedding_size": 64},
        "token2wav_config": {
            "model_type": "qwen2_5_omni_token2wav",
            "bigvgan_config": {
                "model_type": "qwen2_5_omni_bigvgan",
                "mel_dim": 8,
                "resblock_dilation_sizes": [[1, 3, 5]],
                "resblock_kernel_sizes": [3],
                "upsample_initial_channel": 16,
                "upsample_kernel_sizes": [4],
                "upsample_rates": [2],
            },
            "dit_config": {
                "model_type": "qwen2_5_omni_dit",
                "emb_dim": 16,
                "enc_attention_channels": 8,
                "enc_channels": [8, 8, 8, 8, 24],
                "enc_dim": 8,
                "enc_emb_dim": 16,
                "enc_se_channels": 8,
                "head_dim": 16,
                "hidden_size": 32,
                "look_ahead_layers": [0],
                "look_backward_layers": [0],
                "mel_dim": 8,
                "num_attention_heads": 2,
                "num_embeds": 9,
                "num_hidden_layers": 1,
            },
        },
    },
}
"""Name -> Hugging Face config, with ``model_type``."""
