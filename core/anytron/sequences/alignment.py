"""Check the lengths of a ragged batch, and decide to which length each sequence is padded. No other file does.

The rules are those of Megatron-Core's context parallelism and of Transformer Engine's FP8 kernels, as
verl, ms-swift and slime use them (docs/explanation/layouts.md). Elsewhere they are written out once
for text, once for vision models and once for labels, and disagree (verl
``models/mcore/util.py:861-891`` leaves out FP8).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.base.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


FP8_SEQUENCE = 16
"""Tokens of which a packed sequence is a multiple: the block of FP8 matrix products."""
FP8_TOTAL = 128
"""Alignments of which the whole buffer is a multiple: the tile of block-scaled FP8."""


def sequence_alignment(tensor_parallel: int, chunks: int, align: int) -> int:
    """Tokens of which every padded sequence is a multiple.

    Args:
        tensor_parallel: Sequence parallelism splits the rows by it.
        chunks: Pieces into which context parallelism cuts a sequence (``2 * cp``; 1 without).
        align: What the platform asks for.
    """
    return math.lcm(tensor_parallel * chunks, align)


def padded_packed(real: Tensor, align: int, bucket: int, cp: int, *, fp8: bool) -> Tensor:
    """Lengths in a packed buffer: int64 ``[B]``; padding of the total is added to the last sequence."""
    per_sequence = math.lcm(FP8_SEQUENCE, align) if fp8 else align
    padded = (real + (per_sequence - 1)).div_(per_sequence, rounding_mode="floor").mul_(per_sequence)
    # The bucket counts the packed buffer of all shards; the deficit must keep the last sequence aligned.
    whole = math.lcm(bucket, cp) if bucket > 1 else 1
    if fp8:
        whole = math.lcm(whole, FP8_TOTAL * align)
    if whole > 1:
        total = int(padded.sum())
        padded[-1] += round_up(total, math.lcm(whole, per_sequence)) - total
    return padded


def padded_rows(real: Tensor, align: int, bucket: int, ranks: int, *, fp8: bool) -> Tensor:
    """Lengths where each sequence has a row: int64 ``[B]``, all the same.

    Args:
        real: int64 ``[B]``.
        align: Tokens of which a row is a multiple.
        bucket: The same, as the platform's bucket.
        ranks: Tensor times context parallel ranks, between which FP8 blocks are split.
        fp8: ``B * S`` is a multiple of 128 blocks on every rank.
    """
    if fp8:
        block = FP8_TOTAL * ranks
        align = math.lcm(block // math.gcd(real.numel(), block), align)
    return torch.full_like(real, round_up(int(real.max()), math.lcm(align, bucket)))


def round_up(value: int, multiple: int) -> int:
    """The next multiple, ``value`` itself included."""
    return -(-value // multiple) * multiple


def checked_lengths(lengths: Sequence[int] | Tensor, context_length: int | None = None) -> Tensor:
    """Check lengths: at least one sequence, none empty, none longer than the model's context.

    Args:
        lengths: Real lengths; a sequence of ints or an int tensor ``[B]``. One on a device is copied
            to the host, once: the only synchronisation that a layout costs.
        context_length: The longest sequence that the model reads; None = no limit.

    Returns:
        int64 ``[B]`` on the host.

    Raises:
        DataError: Another shape, no integers, a length below 1 or above ``context_length``.
    """
    real = lengths.cpu() if isinstance(lengths, Tensor) else torch.tensor(lengths)
    if real.ndim != 1 or real.numel() == 0:
        raise DataError("A layout needs at least one sequence.", where="lengths", why=f"shape {tuple(real.shape)}")
    if real.dtype.is_floating_point or real.dtype.is_complex or real.dtype is torch.bool:
        raise DataError("Lengths must be integers.", where="lengths", why=f"dtype {real.dtype}")
    real = real.to(torch.int64)
    shortest, longest = (int(end) for end in real.aminmax())
    if shortest < 1:
        index = int(real.argmin())
        raise DataError("A sequence has no tokens.", where="lengths", why=f"sequence {index} has length {shortest}")
    if context_length is not None and longest > context_length:
        index = int(real.argmax())
        raise DataError(
            "A sequence is longer than the model's context.",
            where="lengths",
            why=f"sequence {index} has length {longest}, the context {context_length}",
            fix="use shorter prompts, or lower rollout.max_new_tokens",
        )
    return real
