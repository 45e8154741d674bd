"""Attention in chunks (Llama 4): up to which length mcore-bridge's whole attention is the same. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULTS = {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192}
"""Of transformers' ``Llama4TextConfig``."""


def longest_whole(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence for which Llama 4 computes what whole, unscaled attention computes.

    Its layers with rotary embeddings attend to keys of the same chunk of ``attention_chunk_size`` tokens; those without
    multiply the query at position p by ``1 + attn_scale log(1 + floor((p + 1) / floor_scale))``
    (``llama4/modeling_llama4.py``, ``Llama4TextAttention``).

    Args:
        config: Hugging Face config of any model.

    Returns:
        The number of tokens; None if the model has no such layers.
    """
    if config.get("model_type") != "llama4":
        return None
    text = config.get("text_config") or {}
    chunk, tunes, floor = (text.get(name, default) for name, default in _DEFAULTS.items())
    limits = [chunk] if chunk else []
    return min([*limits, floor - 1] if tunes else limits, default=None)
