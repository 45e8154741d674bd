"""Read from Megatron's configuration what about a model decides the mask it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.traits import ModelTraits

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
