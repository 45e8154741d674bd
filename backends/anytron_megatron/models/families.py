"""The table of model families, with one row per Hugging Face ``model_type``. Imports no Megatron.

To add a family, let a test in ``tests/backends/megatron/families`` compare it with Hugging Face and name in
``proof`` what that test proves. Another test requires ``proof`` to be exactly what the tests prove, and
``docs/reference/families.md`` to show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anytron_megatron.models.weight_names import (
    deepseek_v3_layer,
    dense_layer,
    model_tensors,
    qwen2_5_vision_tower,
    qwen3_moe_layer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron_megatron.models.weight_names import LayerTensors, Shapes, TowerTensors

COLUMNS = ("thd", "bshd", "TP", "PP", "VPP", "CP", "EP", "replay", "MTP", "LoRA", "images", "cache")
"""What tests can prove for a family: sequence formats, ways to split a model, replay of the rollout's routing, training
of prediction modules (MTP), adapters (LoRA) and images, and generation on the training ranks (cache)."""


@dataclass(frozen=True)
class Family:
    """One ``model_type`` that mcore-bridge can build, and what was tested with it.

    Attributes:
        model_type: Value of ``model_type`` in ``config.json``.
        title: Common name of the family; empty for families that no test compares with Hugging Face.
        proof: Entries of :data:`COLUMNS` that a test proves: equal to Hugging Face, and to the other layouts.
        refused: Entries of :data:`COLUMNS` that the checks refuse.
        sparse_attention: Whether it has DeepSeek sparse attention, which runs with megatron-core 0.19 and later.
        hybrid: Whether it has Mamba-2 layers, in a ``HybridModel``, which run with megatron-core 0.19 and later.
        obstacle: Why no configuration can train it; empty if one can.
        wanted: Fields of the language model that mcore-bridge needs, and whose default in transformers is null.
        needs: A package without which mcore-bridge cannot build it: the name to import, and the name to install.
        layer: Function that lists the tensors of a layer in published files; None = unknown before the training ranks
            have built the model.
        tower: Function that returns the tensors of the vision tower; None if it has no tower, or if ``layer`` is None.
        rotates_whole_heads: Whether its code in transformers ignores ``partial_rotary_factor``, which Megatron reads.
        takes_images: Whether :mod:`anytron_megatron.training.vision` makes image positions and inputs in the form of
            this family. A tower of another family stays as it is: prompts with images are refused.
        language_models: Model types of its language model that tests compare; empty if it always has the same one.
        cacheless: Why it cannot generate on its training ranks; empty if it can, or if no test has tried.
    """

    model_type: str
    title: str = ""
    proof: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    sparse_attention: bool = False
    hybrid: bool = False
    obstacle: str = ""
    wanted: tuple[str, ...] = ()
    needs: tuple[str, str] | None = None
    layer: LayerTensors | None = None
    tower: TowerTensors | None = None
    rotates_whole_heads: bool = False
    takes_images: bool = False
    language_models: tuple[str, ...] = ()
    cacheless: str = ""

    def tensors(self, config: Mapping[str, Any]) -> Shapes | None:
        """List the tensors of a model without its multi-token prediction modules.

        The result is None if the family's tensors are not known, or if the config leaves sizes to the defaults of its
        class.
        """
        return None if self.layer is None else model_tensors(config, self.layer, self.tower)


_FORMATS = ("thd", "bshd")
_DENSE = (*_FORMATS, "TP", "PP", "CP")
_EXPERTS = (*_DENSE, "VPP", "EP", "replay", "LoRA", "cache")
_PUBLISHED = (*_DENSE, "VPP")
_PUBLISHED_EXPERTS = (*_PUBLISHED, "EP", "replay")
_PARTLY_READ = ("LoRA", "images")
_PUBLISHED_IMAGES = (*_DENSE, "images")
_NO_STATE = "mcore-bridge's Gated DeltaNet keeps no state from one forward pass to the next"
_NO_STATES = "no test compares the states that Megatron's Mamba layers keep with their forward pass"
_NO_KEYS = "mcore-bridge's sparse attention keeps no keys from one forward pass to the next"
_WINDOW = "no test compares a cache of layers with a sliding window with their forward pass"
_NO_IMAGES = "no test generates from images with a cache"
_UNRELEASED = "mcore-bridge builds it with Megatron's development branch only"
_WITHOUT_CLASS = "transformers has no class for it, and Anytron runs no code of a model directory (SECURITY.md)"
_N_GRAMS = (
    "mcore-bridge computes its attention in packed sequences with Triton kernels, which no test has run, and exports "
    "its table of n-grams in split_ngram_parts tensors, where a rollout engine has one"
)

_ROWS = (
    Family(
        "qwen3",
        "Qwen3",
        proof=(*_DENSE, "VPP", "LoRA", "cache"),
        layer=partial(dense_layer, qk_norm=True),
        rotates_whole_heads=True,
    ),
    Family(
        "qwen2",
        "Qwen2, Qwen2.5",
        (*_DENSE, "VPP", "cache"),
        layer=partial(dense_layer, qkv_bias=True),
        rotates_whole_heads=True,
    ),
    Family("llama", "Llama", (*_DENSE, "cache"), layer=dense_layer, rotates_whole_heads=True),
    Family("qwen3_moe", "Qwen3-MoE", _EXPERTS, layer=qwen3_moe_layer, rotates_whole_heads=True),
    Family("deepseek_v3", "DeepSeek-V3", (*_EXPERTS, "MTP"), layer=deepseek_v3_layer, rotates_whole_heads=True),
    Family("qwen3_next", "Qwen3-Next", (*_DENSE, "EP", "replay", "LoRA"), refused=("cache",), cacheless=_NO_STATE),
    Family(
        "qwen3_5",
        "Qwen3.5",
        (*_DENSE, "images"),
        refused=("cache",),
        takes_images=True,
        cacheless=_NO_STATE,
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        (*_DENSE, "LoRA", "images"),
        refused=("cache",),
        layer=partial(dense_layer, qkv_bias=True),
        tower=qwen2_5_vision_tower,
        takes_images=True,
        cacheless=_NO_IMAGES,
    ),
    Family(
        "qwen3_vl",
        "Qwen3-VL",
        (*_DENSE, "images"),
        refused=("cache",),
        takes_images=True,
        cacheless=_NO_IMAGES,
    ),
    Family("glm4_moe", "GLM-4.5, GLM-4.6, GLM-4.7", (*_PUBLISHED_EXPERTS, "LoRA", "cache")),
    Family(
        "gpt_oss",
        "gpt-oss",
        _PUBLISHED_EXPERTS,
        refused=("cache",),
        rotates_whole_heads=True,
        cacheless=_WINDOW,
    ),
    Family("minimax_m2", "MiniMax-M2", (*_PUBLISHED_EXPERTS, "cache"), wanted=("scoring_func",)),
    Family("qwen2_moe", "Qwen2-MoE", (*_PUBLISHED_EXPERTS, "cache"), rotates_whole_heads=True),
    Family("olmoe", "OLMoE", (*_PUBLISHED_EXPERTS, "LoRA", "cache"), rotates_whole_heads=True),
    Family("deepseek_v2", "DeepSeek-V2", (*_PUBLISHED_EXPERTS, "LoRA", "cache"), rotates_whole_heads=True),
    Family("ernie4_5", "ERNIE-4.5", (*_PUBLISHED, "LoRA", "cache"), rotates_whole_heads=True),
    Family("ernie4_5_moe", "ERNIE-4.5-MoE", (*_PUBLISHED_EXPERTS, "LoRA", "cache"), rotates_whole_heads=True),
    Family(
        "hy_v3",
        "Hunyuan 3",
        (*_PUBLISHED_EXPERTS, "cache"),
        rotates_whole_heads=True,
        wanted=("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"),
    ),
    Family("kimi_k2", "Kimi-K2", (*_PUBLISHED_EXPERTS, "LoRA", "cache")),
    Family(
        "dots1",
        "dots.llm1",
        (*_PUBLISHED_EXPERTS, "LoRA", "cache"),
        rotates_whole_heads=True,
        wanted=("n_routed_experts",),
    ),
    Family("internlm3", "InternLM3", (*_PUBLISHED, "LoRA", "cache"), rotates_whole_heads=True),
    Family("mimo", "MiMo", (*_PUBLISHED, "cache")),
    Family("glm4", "GLM-4", (*_PUBLISHED, "cache")),
    Family("glm4_moe_lite", "GLM-4.7-Flash", (*_PUBLISHED_EXPERTS, "LoRA", "cache")),
    Family(
        "qwen3_5_moe",
        "Qwen3.5-MoE",
        (*_PUBLISHED_IMAGES, "EP", "replay"),
        refused=("cache",),
        takes_images=True,
        cacheless=_NO_STATE,
    ),
    Family(
        "qwen2_vl",
        "Qwen2-VL",
        _PUBLISHED_IMAGES,
        refused=("cache",),
        takes_images=True,
        cacheless=_NO_IMAGES,
    ),
    Family(
        "qwen3_vl_moe",
        "Qwen3-VL-MoE",
        (*_PUBLISHED_IMAGES, "EP", "replay"),
        refused=("cache",),
        takes_images=True,
        cacheless=_NO_IMAGES,
    ),
    Family("glm4v", "GLM-4.1V", _PUBLISHED_IMAGES, refused=("cache",), takes_images=True, cacheless=_NO_IMAGES),
    Family(
        "glm4v_moe",
        "GLM-4.5V, GLM-4.6V",
        (*_PUBLISHED_IMAGES, "EP", "replay"),
        refused=("cache",),
        takes_images=True,
        cacheless=_NO_IMAGES,
    ),
    Family(
        "deepseek_v32",
        "DeepSeek-V3.2",
        (*_PUBLISHED, "EP"),
        refused=("cache",),
        sparse_attention=True,
        rotates_whole_heads=True,
        cacheless=_NO_KEYS,
    ),
    Family(
        "glm_moe_dsa", "GLM-5", (*_PUBLISHED, "EP"), refused=("cache",), sparse_attention=True, cacheless=_NO_KEYS
    ),
    Family("kimi_k25", "Kimi-K2.5", (*_PUBLISHED_EXPERTS, "cache"), _PARTLY_READ),
    Family("kimi_vl", "Kimi-VL", (*_PUBLISHED_EXPERTS, "cache"), _PARTLY_READ),
    Family("internvl_chat", "InternVL (internvl_chat)", (*_PUBLISHED_EXPERTS, "cache"), _PARTLY_READ),
    Family("ovis2_5", "Ovis2.5", (*_PUBLISHED, "cache"), _PARTLY_READ),
    Family("llavaonevision1_5", "LLaVA-OneVision-1.5", (*_PUBLISHED, "cache"), _PARTLY_READ),
    Family("deepseek_v4", "DeepSeek-V4", refused=_FORMATS, obstacle=_UNRELEASED),
    Family("glm5_next", "GLM-5.3", refused=_FORMATS, obstacle=_UNRELEASED),
    Family(
        "gemma4",
        "Gemma 4",
        (*_PUBLISHED, "EP"),
        refused=("images", "cache"),
        cacheless=_WINDOW,
    ),
    Family("gemma4_unified", "Gemma 4 12B", (*_PUBLISHED, "LoRA"), refused=("images", "cache"), cacheless=_WINDOW),
    Family(
        "internvl",
        "InternVL3, InternVL3.5",
        (*_DENSE, "EP", "LoRA", "cache"),
        refused=("images",),
        language_models=("qwen2", "qwen3", "qwen3_moe"),
        rotates_whole_heads=True,
    ),
    Family(
        "llama4",
        "Llama 4",
        (*_PUBLISHED, "EP", "cache"),
        refused=("LoRA", "images"),
    ),
    Family("minicpmv4_6", "MiniCPM-V 4.6", (*_PUBLISHED, "LoRA"), refused=("images", "cache"), cacheless=_NO_STATE),
    Family(
        "muse_glimmer",
        "Muse Glimmer",
        (*_PUBLISHED, "LoRA"),
        refused=("images", "cache"),
        cacheless=_WINDOW,
    ),
    Family("bailing_hybrid", needs=("fla", "flash-linear-attention")),
    Family(
        "qwen3_asr",
        "Qwen3-ASR",
        refused=_FORMATS,
        obstacle="mcore-bridge takes its audio encoder from the package qwen-asr, which wants transformers before 5.0",
    ),
    Family("qwen4_exp", "Qwen4-Exp", refused=_FORMATS, obstacle=_N_GRAMS),
    Family("deepseek", "DeepSeekMoE", refused=_FORMATS, obstacle=_WITHOUT_CLASS),
    Family("bailing_moe", "Ling", refused=_FORMATS, obstacle=_WITHOUT_CLASS),
    Family(
        "qwen2_5_omni",
        "Qwen2.5-Omni",
        (*_PUBLISHED, "LoRA", "cache"),
        refused=("images",),
        rotates_whole_heads=True,
    ),
    Family(
        "qwen3_omni_moe",
        "Qwen3-Omni",
        (*_PUBLISHED_EXPERTS, "LoRA", "cache"),
        refused=("images",),
        rotates_whole_heads=True,
    ),
    Family("nemotron_h", "Nemotron-3", (*_DENSE, "EP"), refused=("cache",), hybrid=True, cacheless=_NO_STATES),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {row.model_type: row for row in _ROWS}
"""Every ``model_type`` that mcore-bridge 1.6.5 registers with megatron-core 0.16 to 0.19 (``nemotron_h``: with 0.18 and
0.19 only). A test compares this table with mcore-bridge, whose import imports Megatron."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the row of a model, from the fields of its ``config.json``; None if mcore-bridge cannot build it."""
    return FAMILIES.get(str(config.get("model_type")))


def has_idle_tower(config: Mapping[str, Any]) -> bool:
    """Return whether a model's towers of images and sound, if it has any, get none, and so are not trained."""
    family = family_of(config)
    return family is not None and not family.takes_images


def proved(column: str) -> str:
    """Return the model types for which tests prove an entry of :data:`COLUMNS`, as text for error messages."""
    return ", ".join(sorted(row.model_type for row in _ROWS if column in row.proof))
