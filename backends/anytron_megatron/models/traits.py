"""What a model needs of its masks and of a platform, and which masks reach it. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.traits import ModelTraits
from anytron.device.platform import Feature
from anytron.sequences.masks import MaskKind

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def traits_of(config: TransformerConfig) -> ModelTraits:
    """Give the traits of a language model that is built from a configuration of Megatron's."""
    window = getattr(config, "window_size", None)
    return ModelTraits(
        causal=True,
        latent_attention=bool(config.multi_latent_attention),
        linear_attention=getattr(config, "experimental_attention_variant", None) == "gated_delta_net",
        mixture_of_experts=bool(config.num_moe_experts),
        window=None if window is None else (int(window[0]), int(window[1])),
    )


def features_of(config: TransformerConfig) -> list[Feature]:
    """Name what a configuration asks of a platform beside the traits and the sizes."""
    asked = {
        Feature.ATTENTION_SINKS: getattr(config, "softmax_type", "vanilla") != "vanilla",
        Feature.BFLOAT16: config.bf16,
        Feature.RECOMPUTE: config.recompute_granularity == "full",
    }
    return [feature for feature, present in asked.items() if present]


def accepted_masks(sequence_format: str, *, context_parallel: int, vision: bool, portable: bool) -> frozenset[MaskKind]:
    """Name the kinds, as ``build_attn_mask`` is told them (``MaskRequest.accepted``).

    Packed sequences end where ``cu_seqlens`` says, and context parallelism has no layer with all keys: both
    go without a tensor. Otherwise a full mask is possible. Portable attention modules find it in the
    micro-batch's scope, whatever the model's forward passes on. A vendor's modules get it through the forward
    (``mcore_bridge/model/gpt_model.py``), which vision-language models do not support (verl #5904).

    Args:
        sequence_format: ``thd`` or ``bshd``.
        context_parallel: Ranks that share each sequence.
        vision: The model takes images.
        portable: The modules are portable, not a vendor's.
    """
    if sequence_format == "thd" or context_parallel > 1 or (vision and not portable):
        return frozenset({MaskKind.NONE})
    return frozenset({MaskKind.NONE, MaskKind.FULL_4D})
