"""Fixes of mcore-bridge's Gemma 4."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_FAMILIES = ("gemma4", "gemma4_unified")
_ABSENT = {"enable_moe_block": False, "hidden_size_per_layer_input": 0}
"""Fields that transformers' configuration of ``gemma4_unified`` lacks: what it has in their place."""


def name_head_sizes(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``hf_to_mcore_config``: give it Gemma 4's configuration with the fields of the published file.

    mcore-bridge reads ``head_dim`` and ``num_key_value_heads`` of sliding layers, and ``global_head_dim`` and
    ``num_global_key_value_heads`` of the others. transformers keeps the latter two in ``per_layer_config`` only, and
    refuses to read the former two where layers differ. It reads ``enable_moe_block`` and
    ``hidden_size_per_layer_input`` of ``gemma4_unified`` too, which has neither experts nor embeddings for each layer,
    and so no such fields. The configuration that the caller holds is not changed.
    """

    @functools.wraps(original)
    def hf_to_mcore_config(hf_config: Any) -> dict[str, Any]:
        if hf_config.model_type not in _FAMILIES:
            return original(hf_config)
        named = copy.deepcopy(hf_config)
        text = named.text_config
        whole = text.per_layer_config["full_attention"]
        head_dim, groups = whole.head_dim, whole.num_key_value_heads
        text.per_layer_config = None
        text.global_head_dim, text.num_global_key_value_heads = head_dim, groups
        named.hidden_size = text.hidden_size
        for name, value in _ABSENT.items():
            if not hasattr(text, name):
                setattr(text, name, value)
        return original(named)

    return hf_to_mcore_config


def forget_modalities(original: list[str]) -> list[str]:
    """Replace ``Gemma4TextGPTModel.extra_forward_keys``: do without ``mm_token_type_ids``, for text without images."""
    return [key for key in original if key != "mm_token_type_ids"]


def count_layer_norm_once(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Gemma4TextGPTModel.__init__``: take the norm of the layers' embeddings for one of whole sequences.

    Its input is gathered before it, so each tensor-parallel rank has its whole gradient. Marked as a norm of a part of
    the sequence, its gradient would be summed over these ranks.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - becomes a constructor
        original(self, *args, **kwargs)
        norm = getattr(self, "per_layer_projection_norm", None)
        for parameter in [] if norm is None else norm.parameters():
            parameter.sequence_parallel = False

    return __init__


def split_heads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``SplitAlongDim`` in mcore-bridge's module of Gemma 4: split the last dimension, ``[S, B, groups, width]``.

    The original gets the number of parts in place of the dimension, which is right for three parts only.
    """

    @functools.wraps(original)
    def split(mixed: Tensor, _dimension: int, sizes: list[int]) -> Any:
        return original(mixed, mixed.ndim - 1, sizes)

    return split
