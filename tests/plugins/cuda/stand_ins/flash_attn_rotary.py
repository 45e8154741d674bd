"""flash-attn's ``apply_rotary_emb`` by its signature, in float64; it asserts what that asserts.

``flash_attn/layers/rotary.py`` and ``flash_attn/ops/triton/rotary.py`` of flash-attention 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    assert not inplace
    assert seqlen_offsets == 0
    assert cu_seqlens is None
    assert max_seqlen is None
    _, seqlen, _, headdim = x.shape
    seqlen_ro, half = cos.shape
    assert sin.shape == cos.shape
    assert 2 * half <= headdim, "rotary_dim must be <= headdim"
    assert headdim <= 256, "Only support headdim <= 256"
    assert seqlen_ro >= seqlen, "seqlen_ro must be >= seqlen"
    assert cos.dtype == sin.dtype, f"cos and sin must have the same dtype, got {cos.dtype} and {sin.dtype}"
    assert x.dtype == cos.dtype, f"Input and cos/sin must have the same dtype, got {x.dtype} and {cos.dtype}"
    cos, sin = cos[:seqlen, None].double(), sin[:seqlen, None].double()
    turned = x[..., : 2 * half].double()
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = first * cos - second * sin, first * sin + second * cos
    rotated = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], -1)
