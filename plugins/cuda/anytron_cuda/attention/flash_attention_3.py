"""FlashAttention 3 for Hopper GPUs, the module ``flash_attn_interface``.

Sources, in github.com/Dao-AILab/flash-attention at 0251105a, folder hopper: ``flash_attn_varlen_func`` is in
flash_attn_interface.py, its checks are in ``mha_fwd`` and ``mha_bwd`` of flash_api.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_cuda.attention import packed
from anytron_cuda.attention.packed import padded_heads

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.kernels import AttentionCall, AttentionSpec
    from anytron_cuda.attention.packed import Sequences
    from anytron_cuda.capabilities import Capabilities

LIBRARY = "flash_attn_interface"
HOPPER = (9, 0)
LARGEST_HEAD = 256
LARGEST_DETERMINISTIC_HEAD = 192
"""The library rounds larger heads up to 256: ``Deterministic backward not supported for hdim 256``."""


def obstacle(offered: Capabilities, spec: AttentionSpec) -> str | None:
    """Return why FlashAttention 3 cannot compute a layer; None if it can."""
    missing = offered.missing(LIBRARY)
    if missing:
        return missing
    if offered.compute_capability != HOPPER:
        return "it requires a Hopper GPU (compute capability 9.0)"
    if spec.dropout:
        return "it does not support dropout"
    if spec.sinks:
        return "it computes no gradient of the log-sum-exp, which attention sinks need"
    largest = max(spec.qk_dim, spec.v_dim)
    if largest > LARGEST_HEAD:
        return f"it supports heads of at most {LARGEST_HEAD} elements, and this layer has {largest}"
    return None


def call_obstacle(spec: AttentionSpec, call: AttentionCall, dtype: torch.dtype) -> str | None:
    """Return why FlashAttention 3 cannot compute a call of a layer that it supports; None if it can."""
    largest = max(spec.qk_dim, spec.v_dim)
    if largest > LARGEST_DETERMINISTIC_HEAD and torch.are_deterministic_algorithms_enabled():
        return f"its backward pass is not deterministic for heads of more than {LARGEST_DETERMINISTIC_HEAD} elements"
    return packed.call_obstacle(spec, call, dtype)


def takes_smaller_values(qk_size: int, v_size: int) -> bool:
    """Whether values may be smaller than queries, as in DeepSeek's latent attention with 192 and 128."""
    return 128 < qk_size <= 192 and 96 < v_size <= 128


def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Compute attention for :func:`anytron_cuda.attention.packed.make_packed`, with head sizes up to 256."""
    from flash_attn_interface import flash_attn_varlen_func

    size = value.shape[-1]
    query, key, value = padded_heads(query, key, value, equal=not takes_smaller_values(query.shape[-1], size))
    answer = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=sequences.cu_seqlens_q,
        cu_seqlens_k=sequences.cu_seqlens_k,
        max_seqlen_q=sequences.max_seqlen_q,
        max_seqlen_k=sequences.max_seqlen_k,
        softmax_scale=sequences.scale,
        causal=sequences.causal,
        window_size=sequences.window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    # Until 203b9b3d (August 2025) it returned the log-sum-exp as well.
    output: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return output[..., :size]
