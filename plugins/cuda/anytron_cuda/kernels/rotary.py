"""Rotary position embeddings in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.kernels import fused as neutral

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_HEAD = 256
"""``flash_attn/ops/triton/rotary.py``: "Only support headdim <= 256"."""


def flash_attn_rope(x: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rope`, for angles that all heads share; rounded once, from float32.

    ``apply_rotary_emb`` (``flash_attn/layers/rotary.py``) takes ``[1, N, H, D]`` and for each of the N tokens half of
    the cosines, ``[N, R / 2]``, in the type of ``x``: so packed sequences and batches are one call. Angles that differ
    by head, and heads that are longer than it supports, are left to the reference kernel.
    """
    from flash_attn.layers.rotary import apply_rotary_emb

    heads, size = x.shape[-2:]
    shared = x.dim() > 2 and freqs.dim() > 1 and freqs.shape[-2] == 1
    if not shared or size > LARGEST_HEAD:
        return neutral.rope(x, freqs, interleaved)
    once = freqs[..., 0, ::2] if interleaved else freqs[..., 0, : freqs.shape[-1] // 2]
    angles = once.expand(*x.shape[:-2], -1).reshape(-1, once.shape[-1])
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    rotated: Tensor = apply_rotary_emb(x.reshape(1, -1, heads, size), cos, sin, interleaved=interleaved)
    return rotated.view(x.shape)
