"""Names and shapes of the tensors in a model's files, from its Hugging Face config. Imports no Megatron.

Names and shapes are as in published checkpoints; a test compares them with the files that transformers writes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Shapes = dict[str, tuple[int, ...]]
    LayerTensors = Callable[[Mapping[str, Any], int], Shapes]
    TowerTensors = Callable[[Mapping[str, Any]], Shapes]

LM_HEAD, SCORE_HEAD = "lm_head.weight", "score.weight"
"""The output layer of a language model, and that of a model that classifies sequences."""

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_RECOMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_FP8_SCALE = "_scale_inv"


def prediction_tensors(names: Iterable[str], layers: int) -> frozenset[str]:
    """Find the tensors of multi-token prediction modules.

    DeepSeek and GLM number the modules as further layers: the first one has the number ``layers``, the number of the
    model's own layers. Names of such tensors begin with ``mtp.`` in Qwen's files, and with ``model.mtp_`` in MiMo's and
    ERNIE-4.5's.
    """

    def belongs(name: str) -> bool:
        layer = _LAYER.match(name)
        return name.startswith(("mtp.", "model.mtp_")) or (layer is not None and int(layer[1]) >= layers)

    return frozenset(filter(belongs, names))


def published_name(name: str) -> str:
    """Return a tensor's name in published files of vision-language models, given its name in transformers."""
    return name.removeprefix("model.") if name.startswith("model.visual.") else name.replace(".language_model.", ".", 1)


def may_stay_unread(name: str) -> bool:
    """Whether a tensor may be ignored: tables of rotary embeddings, scales of fp8 weights."""
    return bool(_RECOMPUTED.search(name)) or name.endswith(_FP8_SCALE)


def model_tensors(config: Mapping[str, Any], layer: LayerTensors, tower: TowerTensors | None = None) -> Shapes | None:
    """List the shapes of a model's tensors without its multi-token prediction modules.

    Args:
        config: The model's Hugging Face config, whole.
        layer: Function that returns the tensors of each layer of the language model.
        tower: Function that returns the tensors of the vision tower; None = the model has no vision tower.

    Returns:
        The shapes by name; None if the config leaves sizes to the defaults of its class.
    """
    text = config.get("text_config") or config
    try:
        hidden, vocabulary = text["hidden_size"], text["vocab_size"]
        shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
        if not config["tie_word_embeddings"]:
            shapes[LM_HEAD] = (vocabulary, hidden)
        for number in range(text["num_hidden_layers"]):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer(text, number).items()}
        if tower is not None:
            shapes |= {f"visual.{name}": shape for name, shape in tower(config["vision_config"]).items()}
    except (KeyError, TypeError):
        return None
    return shapes


def with_score_head(shapes: Shapes) -> Shapes:
    """Return the tensors of a classifier with one label: a scoring head replaces a language model's output layer."""
    rest = {name: shape for name, shape in shapes.items() if name != LM_HEAD}
    return {**rest, SCORE_HEAD: (1, *shapes["model.norm.weight"])}


def dense_layer(config: Mapping[str, Any], _: int, *, qkv_bias: bool = False, qk_norm: bool = False) -> Shapes:
    """List the tensors of a layer of attention and a gated feed-forward network.

    With ``qkv_bias``, queries, keys and values have biases whatever the config says, and outputs have none; with
    ``qk_norm``, queries and keys have norms.
    """
    biased = config.get("attention_bias", False)
    return {
        **_norms(config),
        **_attention(config, qkv_bias=biased or qkv_bias, output_bias=biased and not qkv_bias, qk_norm=qk_norm),
        **_mlp("mlp", config["hidden_size"], config["intermediate_size"], bias=config.get("mlp_bias", False)),
    }


def qwen3_moe_layer(config: Mapping[str, Any], number: int) -> Shapes:
    """List the tensors of a layer of Qwen3-MoE: attention, and experts or a dense feed-forward network."""
    biased = config.get("attention_bias", False)
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    sparse = number not in dense and (number + 1) % step == 0
    hidden = config["hidden_size"]
    # Published configs have the first name, those that transformers 5 writes the second.
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return {
        **_norms(config),
        **_attention(config, qkv_bias=biased, output_bias=biased, qk_norm=True),
        **(_experts(config, experts) if sparse else _mlp("mlp", hidden, config["intermediate_size"])),
    }


def deepseek_v3_layer(config: Mapping[str, Any], number: int) -> Shapes:
    """List the tensors of a layer of DeepSeek-V3: latent attention, and experts or a dense feed-forward network."""
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


def qwen2_5_vision_tower(config: Mapping[str, Any]) -> Shapes:
    """List the tensors of the vision tower of Qwen2.5-VL, its merger included, given the ``vision_config``."""
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], int(config["patch_size"])
    volume = (config.get("in_channels", 3), config["temporal_patch_size"], patch, patch)
    merged = config["spatial_merge_size"] ** 2 * hidden
    shapes: Shapes = {
        "patch_embed.proj.weight": (hidden, *volume),
        "merger.ln_q.weight": (hidden,),
        **_linear("merger.mlp.0", merged, merged),
        **_linear("merger.mlp.2", merged, config["out_hidden_size"]),
    }
    block = {
        "norm1.weight": (hidden,),
        "norm2.weight": (hidden,),
        **_linear("attn.qkv", hidden, 3 * hidden),
        **_linear("attn.proj", hidden, hidden),
        **_mlp("mlp", hidden, inner, bias=True),
    }
    for number in range(config["depth"]):
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
    return shapes


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norms(config: Mapping[str, Any]) -> Shapes:
    return {f"{place}_layernorm.weight": (config["hidden_size"],) for place in ("input", "post_attention")}


def _attention(config: Mapping[str, Any], *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> Shapes:
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
    if qk_norm:
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
