"""FlashAttention 2, the package ``flash_attn``.

Sources, in github.com/Dao-AILab/flash-attention at 0251105a (2.8.4): ``flash_attn_varlen_func`` is in
flash_attn/flash_attn_interface.py, its checks are in ``mha_varlen_fwd`` and ``mha_varlen_bwd`` of
csrc/flash_attn/flash_api.cpp, and README.md lists GPUs and head sizes ("NVIDIA CUDA Support").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_cuda.attention.packed import padded_heads

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.kernels import AttentionSpec
    from anytron_cuda.attention.packed import Sequences
    from anytron_cuda.capabilities import Capabilities

LIBRARY = "flash_attn"
OLDEST = "2.5.5"
"""Oldest version that is used. It aligns causality to the last query and the last key (2.1), has windows (2.3) and a
deterministic backward pass (2.4.1), and supports heads of 256 in the backward pass on consumer GPUs."""
LARGEST_HEAD = 256
LARGEST_HEAD_EVERYWHERE = 192
"""Larger heads have no backward pass with dropout on consumer GPUs."""
CONSUMER_GPUS = ((8, 6), (8, 9), (12, 0), (12, 1))


def obstacle(offered: Capabilities, spec: AttentionSpec) -> str | None:
    """Return why FlashAttention 2 cannot compute a layer; None if it can."""
    missing = offered.missing(LIBRARY, OLDEST)
    if missing:
        return missing
    if offered.compute_capability < (8, 0):
        return "it requires a GPU of compute capability 8.0 (Ampere) or newer"
    if spec.sinks:
        return "it computes no gradient of the log-sum-exp, which attention sinks need"
    largest = max(spec.qk_dim, spec.v_dim)
    if largest > LARGEST_HEAD:
        return f"it supports heads of at most {LARGEST_HEAD} elements, and this layer has {largest}"
    if largest > LARGEST_HEAD_EVERYWHERE and spec.dropout and offered.compute_capability in CONSUMER_GPUS:
        return f"on this GPU it does not support dropout for heads of more than {LARGEST_HEAD_EVERYWHERE} elements"
    return None


def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Compute attention for :func:`anytron_cuda.attention.packed.make_packed`, with head sizes up to 256."""
    from flash_attn import flash_attn_varlen_func

    query, key, padded = padded_heads(query, key, value)
    output: Tensor = flash_attn_varlen_func(
        query,
        key,
        padded,
        cu_seqlens_q=sequences.cu_seqlens_q,
        cu_seqlens_k=sequences.cu_seqlens_k,
        max_seqlen_q=sequences.max_seqlen_q,
        max_seqlen_k=sequences.max_seqlen_k,
        dropout_p=sequences.dropout,
        softmax_scale=sequences.scale,
        causal=sequences.causal,
        window_size=sequences.window,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output[..., : value.shape[-1]]
