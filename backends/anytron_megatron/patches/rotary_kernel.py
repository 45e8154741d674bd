"""Rotate queries and keys by the platform's kernel, where Megatron would do it in torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from anytron.kernels.contract import KernelName
from anytron_megatron.portable_te.binding import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def rotate_by_kernel(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_apply_rotary_pos_emb_bshd``: what the kernel's contract does not have, a scale, stays Megatron's."""
    rotate = kernels().fused(KernelName.ROPE, None)

    @functools.wraps(original)
    def _apply_rotary_pos_emb_bshd(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        **further: Any,
    ) -> Tensor:
        if mscale != 1.0 or further:
            return original(t, freqs, rotary_interleaved, multi_latent_attention, mscale, **further)
        if multi_latent_attention:
            # Neighbours become halves, and stay so: queries and keys alike.
            size = freqs.shape[-1]
            t = torch.cat((t[..., 0:size:2], t[..., 1:size:2], t[..., size:]), dim=-1)
        rotated: Tensor = rotate(t, freqs, rotary_interleaved)
        return rotated

    return _apply_rotary_pos_emb_bshd
