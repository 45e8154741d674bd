"""Torch's ``scaled_dot_product_attention`` with two kernels that keep no scores: flash and memory-efficient.

It supports what the variable-length functions do not: masks, float32, older GPUs, dropout. Sequences
of similar length share a call (:mod:`anytron.kernels.packed_sequences`). Two other kernels are never used: torch's
``math`` keeps the scores; cuDNN's must plan again for each new shape, hence for every micro-batch, and with masks its
gradients are NaN for some lengths (pytorch #196678: H100 and H200, torch 2.11 to 2.13, where it would come first).

Source: torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron import PlatformError
from anytron.kernels import make_attention as make_neutral
from anytron.kernels import zeros_from
from anytron_cuda.attention.packed import HALF, padded_heads

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.kernels import AttentionKernel, AttentionSpec
    from anytron_cuda.capabilities import Capabilities

LARGEST_FLASH_HEAD = 256


def obstacle(offered: Capabilities, spec: AttentionSpec) -> str | None:
    """Return why ``scaled_dot_product_attention`` cannot compute a layer; None if it can."""
    del offered
    return "it does not support attention sinks" if spec.sinks else None


def make_attention(spec: AttentionSpec) -> AttentionKernel:
    """Return the kernel of one layer."""
    return make_neutral(spec, attend)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, enable_gqa: bool, **settings: Any
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` of ``[B, H, S, D]`` with torch's flash or memory-efficient kernel.

    Raises:
        PlatformError: Neither kernel accepts these operands.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    larger = max(query.shape[-1], value.shape[-1]) > LARGEST_FLASH_HEAD
    if enable_gqa and (attn_mask is not None or query.dtype not in HALF or larger):
        # Where flash does not compute, memory-efficient does, which had no grouped queries for long.
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        enable_gqa = False
    size = value.shape[-1]
    if 0 in (query.shape[2], key.shape[2]):
        return zeros_from((*query.shape[:-1], size), query, key, value)
    query, key, value = map(_with_adjacent_numbers, padded_heads(query, key, value))
    attn_mask = None if attn_mask is None else _with_adjacent_numbers(attn_mask)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            output = scaled_dot_product_attention(
                query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **settings
            )
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise PlatformError(
            "None of torch's fused kernels supports this attention.",
            where="attention_kernel sdpa",
            why=f"queries are {query.dtype} {tuple(query.shape)}, keys {tuple(key.shape)}; torch's warnings above "
            "give the reason of each kernel",
            fix="set platform.options.attention=neutral, whose memory grows with the square of the length",
        ) from error
    return output[..., :size]


def _with_adjacent_numbers(operand: Tensor) -> Tensor:
    """Return operands whose last dimension has stride 1, as the kernels require; other strides may be any.

    Source: aten/src/ATen/native/transformers/sdp_utils_cpp.h, ``check_last_dim_stride_equals_1_dense``.
    ``contiguous()`` would leave a last dimension of one number as it is.
    """
    return operand if operand.stride(-1) == 1 else operand.clone(memory_format=torch.contiguous_format)
