"""Read from Megatron's configuration what a model needs of its masks, and of a platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.traits import ModelTraits
from anytron.device.limits import Feature

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
