"""Tiny models of which Anytron reads the language model alone, with the fields of published ``config.json`` files.

As those of :mod:`published_text`: flags are the published ones, and sizes are cut. Their towers are never built, so
their configurations have only what says what they are.
"""

from __future__ import annotations

from typing import Any

from tests.backends.megatron.families.published_latent import LATENT_MODELS
from tests.backends.megatron.families.published_text import HEADS, ONE_GROUP, ROUTED, SIGMOID, SIZES

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **SIZES,
    **HEADS,
    "attention_bias": False,
    "max_window_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
}
_INTERNVL: dict[str, Any] = {
    "architectures": ["InternVLChatModel"],
    "auto_map": {
        "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
        "AutoModel": "modeling_internvl_chat.InternVLChatModel",
        "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel",
    },
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "force_image_size": 448,
    "ps_version": "v2",
    "select_layer": -1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "intern_vit_6b", "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 14},
}

WHOLE_MODELS: dict[str, dict[str, Any]] = {
    # moonshotai/Kimi-K2.5, its experts unpacked
    "kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        "dtype": "bfloat16",
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 117,
        "text_config": LATENT_MODELS["kimi_k2"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "vision_config": {"mm_projector_type": "patchmerger", "patch_size": 14, "vt_num_hidden_layers": 2},
    },
    # moonshotai/Kimi-VL-A3B-Instruct
    "kimi_vl": {
        "architectures": ["KimiVLForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_vl.KimiVLConfig",
            "AutoModel": "modeling_kimi_vl.KimiVLForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_vl.KimiVLForConditionalGeneration",
        },
        "model_type": "kimi_vl",
        "media_placeholder_token_id": 117,
        "text_config": {
            "model_type": "deepseek_v3",
            **SIZES,
            **ROUTED,
            **ONE_GROUP,
            **SIGMOID,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "attention_bias": False,
            "aux_loss_alpha": 0.001,
            "seq_aux": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 800000.0,
            "routed_scaling_factor": 2.446,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "moonvit", "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 14},
    },
    # OpenGVLab/InternVL3_5-8B
    "internvl_chat": {**_INTERNVL, "llm_config": {**_QWEN3, "attn_implementation": "flash_attention_2"}},
    # OpenGVLab/InternVL3_5-30B-A3B
    "internvl_chat_moe": {
        **_INTERNVL,
        "llm_config": {
            **_QWEN3,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
    },
    # OpenGVLab/InternVL3-8B, without its rope_scaling of type dynamic
    "internvl_chat_qwen2": {
        **_INTERNVL,
        "llm_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            **SIZES,
            "max_window_layers": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
    },
    # AIDC-AI/Ovis2.5-2B
    "ovis2_5": {
        "architectures": ["Ovis2_5"],
        "auto_map": {
            "AutoConfig": "configuration_ovis2_5.Ovis2_5_Config",
            "AutoModelForCausalLM": "modeling_ovis2_5.Ovis2_5",
        },
        "conversation_formatter_class": "Qwen3ConversationFormatter",
        "hidden_size": SIZES["hidden_size"],
        "llm_config": {**_QWEN3, "tie_word_embeddings": True, "torch_dtype": "float32"},
        "model_type": "ovis2_5",
        "torch_dtype": "bfloat16",
        "visual_vocab_size": 32,
        "vit_config": {"model_type": "siglip2_navit", "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 16},
    },
    # lmms-lab/LLaVA-OneVision-1.5-8B-Instruct
    "llava_onevision1_5": {
        "architectures": ["LLaVAOneVision1_5_ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_llavaonevision1_5.Llavaonevision1_5Config",
            "AutoModelForCausalLM": "modeling_llavaonevision1_5.LLaVAOneVision1_5_ForConditionalGeneration",
        },
        "image_token_id": 117,
        "model_type": "llavaonevision1_5",
        "text_config": {
            **{name: value for name, value in _QWEN3.items() if name != "architectures"},
            "model_type": "LLaVAOneVision1_5_text",
            "image_token_id": None,
            "layer_types": ["full_attention"] * 4,
            "video_token_id": None,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "rice_vit", "depth": 2, "patch_size": 14, "spatial_merge_size": 2},
    },
}
"""Name -> whole Hugging Face config, with ``model_type``."""

OTHER_TENSORS: dict[str, tuple[str, ...]] = {
    "kimi_k25": ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"),
    "kimi_vl": ("vision_tower.encoder.blocks.0.wqkv.weight", "multi_modal_projector.linear_1.weight"),
    "internvl_chat": ("vision_model.encoder.layers.0.attn.qkv.weight", "mlp1.1.weight"),
    "ovis2_5": ("visual_tokenizer.vit.vision_model.encoder.layers.0.mlp.fc1.weight", "vte.weight"),
    "llavaonevision1_5": ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.mlp.0.weight"),
}
"""``model_type`` -> some of the tensors that published files have beside the language model's."""
