"""Fix multi-latent attention of older megatron-core with packed sequences.

Hidden states of a packed batch are ``[T, 1, H]``. From 0.13 on, Megatron drops the middle dimension before the up
projection (multi_latent_attention.py of 0.13.0, "If sequence packing, TE expect [t, h, d] shaped qkv input"). 0.12
keeps it, so that rotary embeddings broadcast over it and the kernel receives four dimensions.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def drop_batch_dimension(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_query_key_value_tensors``: return ``[T, N, D]`` for packed sequences, not ``[T, 1, N, D]``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_query_key_value_tensors(*args: Any, **kwargs: Any) -> Any:
        packed = signature.bind(*args, **kwargs).arguments.get("packed_seq_params")
        answer = original(*args, **kwargs)
        if packed is None or packed.qkv_format != "thd":
            return answer
        return tuple(tensor.squeeze(1) for tensor in answer)

    return get_query_key_value_tensors


def rotate_without_batch_dimension(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_apply_rotary_pos_emb_thd``: rotate ``[T, 1, N, D]`` as it does ``[T, N, D]``."""

    @functools.wraps(original)
    def _apply_rotary_pos_emb_thd(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if t.ndim != 4:
            return original(t, *args, **kwargs)
        return original(t.squeeze(1), *args, **kwargs).unsqueeze(1)

    return _apply_rotary_pos_emb_thd


def rotate_at_padded_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_query_key_value_tensors``: pass where padded sequences start, as Megatron does from 0.14 on."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_query_key_value_tensors(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        packed = bound.arguments.get("packed_seq_params")
        if packed is not None and packed.cu_seqlens_q_padded is not None:
            bound.arguments["packed_seq_params"] = replace(
                packed, cu_seqlens_q=packed.cu_seqlens_q_padded, cu_seqlens_kv=packed.cu_seqlens_kv_padded
            )
        return original(*bound.args, **bound.kwargs)

    return get_query_key_value_tensors
