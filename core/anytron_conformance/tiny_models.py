"""Tiny random Hugging Face models of nine families, float32, on disk, for tests of engines and platforms.

Parameters whose initial values would hide a mistake get other values: norms of 1, biases of 0, routers that choose
by rounding error, padding that is embedded as zeros.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.task.data.pretrained import model_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


VOCABULARY = 128
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 120, 121, 122, 123
"""Special tokens of the vision-language models; ordinary tokens are below 120 everywhere."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    # The published configs say so; without them Megatron would route by softmax.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_VISION_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in TEXT.items() if name not in names}


def _mrope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", **_without("head_dim"), "tie_word_embeddings": True},
    "qwen2_5": {"model_type": "qwen2", **_without("head_dim")},
    "qwen3": {"model_type": "qwen3", **TEXT},
    "qwen3_tied": {"model_type": "qwen3", **TEXT, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **TEXT},
    "qwen3_moe": {"model_type": "qwen3_moe", **TEXT, **_EXPERTS, "norm_topk_prob": True},
    "deepseek_v3": {"model_type": "deepseek_v3", **_without("head_dim", "num_key_value_heads"), **_LATENT},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **TEXT,
        **_EXPERTS,
        **DELTA_NET,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.25,
    },
    # With heads enough for two tensor-parallel times two context-parallel ranks.
    "qwen3_next_heads": {
        "model_type": "qwen3_next",
        **TEXT,
        **_EXPERTS,
        **DELTA_NET,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **TEXT,
            **DELTA_NET,
            "rope_parameters": _mrope([2, 1, 1], partial_rotary_factor=0.5, mrope_interleaved=True),
            "partial_rotary_factor": 0.5,  # transformers 5.19 writes 0.25 otherwise, which mcore-bridge reads
        },
        "vision_config": {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
        **_VISION_TOKENS,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {**_without("head_dim"), "rope_parameters": _mrope([4, 2, 2])},
        "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        **_VISION_TOKENS,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {**TEXT, "rope_parameters": _mrope([4, 2, 2], mrope_interleaved=True)},
        "vision_config": {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_VISION_TOKENS,
    },
}
"""Family name -> Hugging Face config, with ``model_type``."""


def write_tiny_model(family: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model of a family: config and float32 safetensors, no tokenizer.

    Args:
        family: A key of :data:`CONFIGS`.
        directory: Output directory; created if it does not exist.
        seed: Seed of the weights.
        changes: Fields of the (top-level) config to replace.

    Returns:
        The directory.
    """
    return write_random_model({**CONFIGS[family], **changes}, directory, seed=seed)


def write_random_model(config: Mapping[str, Any], directory: Path, *, seed: int = 0) -> Path:
    """Write a model with random weights: config and float32 safetensors, no tokenizer.

    Args:
        config: A Hugging Face config, with ``model_type``.
        directory: Output directory; created if it does not exist.
        seed: Seed of the weights.

    Returns:
        The directory.
    """
    import torch
    from transformers import AutoConfig

    fields = dict(config)
    torch.manual_seed(seed)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = model_class(hf_config).from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name or ".ln_" in name) and parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.02)
            elif name.endswith("embed_tokens.weight"):  # token 0 pads: its row is zero, and so is what it leads to
                parameter[0].normal_(std=0.02)
            elif name.endswith("A_log"):  # Hugging Face's start makes some heads forget at every token
                parameter.copy_(torch.empty_like(parameter).uniform_(0.05, 1.0).log())
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith(("gate.weight", "router.weight", "router.proj.weight", "sinks")):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros would choose the same experts as no bias
                bias.add_(torch.randn_like(bias) * 0.1)
            elif name.endswith("layer_scalar"):
                bias.mul_(torch.empty_like(bias).uniform_(0.8, 1.2))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return directory


def turn_last_layers_into_prediction_modules(directory: Path, count: int) -> None:
    """Turn the last layers of a DeepSeek-V3 into multi-token prediction modules, named as in the published files.

    Hugging Face's model has no such modules: it loads only the layers before them.

    Args:
        directory: Directory of a model with one file of weights; changed in place.
        count: Layers that become modules.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    torch.manual_seed(3)
    for number in range(layers - count, layers):
        module = {
            "enorm.weight": 1.0 + 0.1 * torch.randn(hidden),
            "hnorm.weight": 1.0 + 0.1 * torch.randn(hidden),
            "shared_head.norm.weight": 1.0 + 0.1 * torch.randn(hidden),
            "eh_proj.weight": 0.1 * torch.randn(hidden, 2 * hidden),
            "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
            "shared_head.head.weight": weights["lm_head.weight"].clone(),
        }
        weights |= {f"model.layers.{number}.{name}": tensor for name, tensor in module.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": layers - count, "num_nextn_predict_layers": count}
    (directory / "config.json").write_text(json.dumps(config))
