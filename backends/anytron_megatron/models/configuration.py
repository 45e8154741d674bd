"""Read traits, masks, missing fields and number formats from a model's configuration. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from anytron.base.errors import ConfigError
from anytron.base.traits import ModelTraits
from anytron.device.platform import Feature
from anytron.sequences.masks import MaskKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron.core.transformer import TransformerConfig


COMPLETED = frozenset({"rope_type", "factor", "mscale", "mscale_all_dim"})
"""Rotary fields that mcore-bridge reads by subscript, and :func:`completed` fills in where a file lacks them."""


def traits_of(config: TransformerConfig) -> ModelTraits:
    """Return the traits of a language model that is built from a Megatron configuration."""
    window = getattr(config, "window_size", None)
    return ModelTraits(
        causal=True,
        latent_attention=bool(config.multi_latent_attention),
        linear_attention=bool(
            getattr(config, "is_hybrid_model", False)  # Mamba layers
            or getattr(config, "experimental_attention_variant", None) == "gated_delta_net"
        ),
        mixture_of_experts=bool(config.num_moe_experts),
        sparse_attention=getattr(config, "experimental_attention_variant", None) == "dsa",
        window=None if window is None else (int(window[0]), int(window[1])),
    )


SPARSE_ATTENTION_FIELDS = {"cp_comm_type": "allgather", "dsa_indexer_k_norm_epsilon": 1e-6}
"""Fields of Megatron's transformer config for models with DeepSeek sparse attention. With context parallelism its
layers gather keys, and refuse every other way. The norm of the indexer's keys has an epsilon of its own, in
transformers, vLLM and DeepSeek's code; Megatron would take ``rms_norm_eps``, which is 1e-5 in GLM-5."""


def features_of(config: TransformerConfig) -> list[Feature]:
    """Return the features that a model needs from a platform besides those that its traits and the sizes imply."""
    asked = {
        Feature.ATTENTION_SINKS: getattr(config, "softmax_type", "vanilla") != "vanilla",
        Feature.BFLOAT16: config.bf16,
        Feature.RECOMPUTE: config.recompute_granularity == "full",
    }
    return [feature for feature, present in asked.items() if present]


def accepted_masks(sequence_format: str, *, context_parallel: int, vision: bool, portable: bool) -> frozenset[MaskKind]:
    """Return the kinds of mask that can reach the attention of mcore-bridge's models (``MaskRequest.accepted``).

    For packed sequences ``cu_seqlens`` is enough, and with context parallelism no layer has all keys: neither
    uses a mask tensor. Otherwise a full mask is possible. Portable attention modules find it in the
    micro-batch's scope, independently of the arguments of the model's forward. A vendor's modules get it through the
    forward (``mcore_bridge/model/gpt_model.py``), which vision-language models do not support (verl #5904).

    Args:
        sequence_format: ``thd`` or ``bshd``.
        context_parallel: Number of ranks between which each sequence is divided.
        vision: Whether the model takes images.
        portable: Whether the modules come from :mod:`anytron_megatron.portable_te`, not from a vendor.
    """
    if sequence_format == "thd" or context_parallel > 1 or (vision and not portable):
        return frozenset({MaskKind.NONE})
    return frozenset({MaskKind.NONE, MaskKind.FULL_4D})


def completed(converted: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in rotary fields that mcore-bridge requires and that a published configuration may lack or have as null.

    The defaults are transformers' defaults. ``mscale_all_dim`` = 0 does not change the scale of the softmax
    (``yarn_apply_mscale`` of its DeepSeek-V3). If ``mscale`` or ``mscale_all_dim`` is 0, ``factor`` alone scales the
    embeddings. ``factor`` is by default the context length divided by the original one
    (``_compute_yarn_parameters``).

    Args:
        converted: Result of ``hf_to_mcore_config``, which is not changed; these fields are in its ``rope_scaling``.
    """
    rotary = converted.get("rope_scaling")
    if not rotary or any(isinstance(value, dict) for value in rotary.values()):  # one for each type of layer
        return dict(converted)
    given = {key: value for key, value in rotary.items() if value is not None}
    whole: dict[str, Any] = {"rope_type": given.get("type", "default"), **given}
    if whole["rope_type"] == "yarn":
        first = given.get("original_max_position_embeddings", converted["max_position_embeddings"])
        stretched = converted["max_position_embeddings"] / first
        whole = {"factor": stretched, "mscale": 0.0, "mscale_all_dim": 0.0, **whole}
    return {**converted, "rope_scaling": whole}


class _Quantisation(Protocol):
    fp8: str | None
    fp4: str | None


def refuse_missing_quantisation(config: _Quantisation) -> None:
    """Refuse a number format that Transformer Engine, the real or the portable one, does not have.

    Without this check Megatron would fail in the first forward pass, after trajectories have been generated.

    Raises:
        ConfigError: FP8 or FP4 is configured and Transformer Engine lacks FP8, which FP4 needs as well.
    """
    asked = [name for name in ("fp8", "fp4") if getattr(config, name)]
    if not asked:
        return
    from transformer_engine.pytorch.fp8 import check_fp8_support

    supported, reason = check_fp8_support()
    if not supported:
        raise ConfigError(
            f"This device cannot train with {' and '.join(f'{name}={getattr(config, name)}' for name in asked)}.",
            where=", ".join(f"engine.options.transformer.{name}" for name in asked),
            why=reason,
            fix=f"set {' and '.join(f'engine.options.transformer.{name}=null' for name in asked)}, and train in "
            "bfloat16 or float32",
        )
