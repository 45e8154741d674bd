"""Which tensors the files of a model hold, by its Hugging Face config. Light to import.

Names and shapes are those of published checkpoints; tests hold them against what transformers writes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Shapes = dict[str, tuple[int, ...]]

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_FP8_SCALE = "_scale_inv"


def prediction_tensors(names: Iterable[str], layers: int) -> frozenset[str]:
    """Find the tensors of multi-token prediction modules.

    DeepSeek and GLM count the modules on behind the last layer, Qwen has them under ``mtp.``.

    Args:
        names: Tensors of a checkpoint.
        layers: Layers of the model without its modules.
    """

    def belongs(name: str) -> bool:
        layer = _LAYER.match(name)
        return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= layers)

    return frozenset(filter(belongs, names))


def may_stay_unread(name: str) -> bool:
    """Whether a tensor says nothing that the config does not: tables of rotary embeddings, scales of fp8 weights."""
    return bool(_RECOMPUTED.search(name)) or name.endswith(_FP8_SCALE)


def expected_tensors(config: Mapping[str, Any]) -> Shapes | None:
    """List the tensors of a model without its multi-token prediction modules.

    Args:
        config: Contents of ``config.json``.

    Returns:
        Shapes by name; None if this module does not know the family, or if the config leaves sizes to
        the defaults of its class.
    """
    layer = _FAMILIES.get(config.get("model_type", ""))
    try:
        if layer is None:
            return None
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (vocabulary, hidden)
        for number in range(config["num_hidden_layers"]):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer(config, number).items()}
    except (KeyError, TypeError):
        return None
    return shapes


def _dense_layer(config: Mapping[str, Any], _: int) -> Shapes:
    biased = config.get("attention_bias", False)
    return {
        **_norms(config),
        **_attention(config, qkv_bias=biased or config["model_type"] == "qwen2", output_bias=biased),
        **_mlp("mlp", config["hidden_size"], config["intermediate_size"], bias=config.get("mlp_bias", False)),
    }


def _qwen3_moe_layer(config: Mapping[str, Any], number: int) -> Shapes:
    biased = config.get("attention_bias", False)
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    sparse = number not in dense and (number + 1) % step == 0
    hidden = config["hidden_size"]
    # Published configs have the first name, those that transformers 5 writes the second.
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return {
        **_norms(config),
        **_attention(config, qkv_bias=biased, output_bias=biased),
        **(_experts(config, experts) if sparse else _mlp("mlp", hidden, config["intermediate_size"])),
    }


def _deepseek_v3_layer(config: Mapping[str, Any], number: int) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    plain, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    wide = heads * (plain + rotary)
    if queries is None:
        query: Shapes = {"self_attn.q_proj.weight": (wide, hidden)}
    else:
        query = {
            "self_attn.q_a_proj.weight": (queries, hidden),
            "self_attn.q_a_layernorm.weight": (queries,),
            "self_attn.q_b_proj.weight": (wide, queries),
        }
    shapes = {
        **_norms(config),
        **query,
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rotary, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (plain + value), latent),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if number < config["first_k_dense_replace"]:
        return shapes | _mlp("mlp", hidden, config["intermediate_size"])
    experts, shared = config["n_routed_experts"], config["n_shared_experts"]
    shapes |= _experts(config, experts)
    shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    return shapes | _mlp("mlp.shared_experts", hidden, shared * config["moe_intermediate_size"])


def _norms(config: Mapping[str, Any]) -> Shapes:
    return {f"{place}_layernorm.weight": (config["hidden_size"],) for place in ("input", "post_attention")}


def _attention(config: Mapping[str, Any], *, qkv_bias: bool, output_bias: bool) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    groups = config["num_key_value_heads"]
    shapes: Shapes = {"self_attn.o_proj.weight": (hidden, heads * size)}
    for name, rows in (("q", heads * size), ("k", groups * size), ("v", groups * size)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config["model_type"].startswith("qwen3"):
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    return shapes


def _mlp(prefix: str, hidden: int, inner: int, *, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{prefix}.down_proj.weight": (hidden, inner)}
    shapes |= {f"{prefix}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    if bias:
        shapes |= {f"{prefix}.{name}_proj.bias": (inner,) for name in ("gate", "up")}
        shapes[f"{prefix}.down_proj.bias"] = (hidden,)
    return shapes


def _experts(config: Mapping[str, Any], count: int) -> Shapes:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: Shapes = {"mlp.gate.weight": (count, hidden)}
    for number in range(count):
        shapes |= _mlp(f"mlp.experts.{number}", hidden, inner)
    return shapes


_FAMILIES: dict[str, Callable[[Mapping[str, Any], int], Shapes]] = {
    "llama": _dense_layer,
    "qwen2": _dense_layer,
    "qwen3": _dense_layer,
    "qwen3_moe": _qwen3_moe_layer,
    "deepseek_v3": _deepseek_v3_layer,
}
