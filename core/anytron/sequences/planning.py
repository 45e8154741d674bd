"""Turn the lengths of sequences into a layout, on the host, without a loop over sequences.

No other file checks the lengths of a ragged batch, or decides to which length each sequence is padded. The rules are
those of Megatron-Core's context parallelism and of Transformer Engine's FP8 kernels, as verl, ms-swift and slime use
them (docs/explanation/layouts.md). Other frameworks implement them separately for text, for vision models and for
labels, and the implementations disagree (verl ``models/mcore/util.py:861-891`` leaves out FP8).

First the *whole* is planned: all padded sequences one after the other. Then each context-parallel shard
selects slots of the whole, in another order. The fields of a rank's layout describe the slots of its shard.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.base.errors import DataError
from anytron.sequences.layout import ContextShard, Format, InputLayout, LayoutConstraints, SequenceLayout

if TYPE_CHECKING:
    from collections.abc import Sequence


FP8_SEQUENCE = 16
"""A packed sequence has a multiple of this many tokens: the block of FP8 matrix products."""


FP8_TOTAL = 128
"""The whole buffer is a multiple of this many alignments: the tile of block-scaled FP8."""


def plan_layout(
    lengths: Sequence[int] | Tensor,
    *,
    format: Format = "thd",
    tensor_parallel: int = 1,
    shard: ContextShard | None = None,
    constraints: LayoutConstraints | None = None,
    fp8: bool = False,
    context_length: int | None = None,
    input_layout: InputLayout = "shard",
    device: torch.device | str = "cpu",
) -> SequenceLayout:
    """Turn the lengths of sequences into a layout.

    Each sequence is padded on the right to a multiple of an alignment: the least common multiple of
    ``constraints.align`` and ``tensor_parallel`` (``2 * tensor_parallel * cp`` with context parallelism). FP8
    (Transformer Engine's block sizes) needs more padding. In thd, each sequence also has a multiple of 16 tokens, and
    their sum is a multiple of 128 alignments. In bshd, the row length grows until ``B * S`` is a multiple of 128 on
    every rank. Padding of the sum is added to the last sequence.

    Args:
        lengths: Real lengths, each at least 1; a sequence of ints or an int tensor ``[B]``, preferably on the
            host: a tensor on a device is copied to the host, which waits for the device.
        format: ``thd`` or ``bshd``.
        tensor_parallel: Tensor-parallel size (sequence parallelism splits the rows by it).
        shard: The context-parallel shard; default: no context parallelism.
        constraints: Requirements of the platform; None = it has none.
        fp8: Whether to pad for FP8 kernels.
        context_length: The longest sequence that the model reads; None = no limit. Positions of
            padding stay below it too, for models that look positions up in a table.
        input_layout: How the model takes its input; see :data:`InputLayout`.
        device: Device of the index tensors.

    Returns:
        The layout of ``shard``.

    Raises:
        DataError: No sequence, a length below 1 or above ``context_length``; sizes below 1; an option that
            does not exist or that the format does not have.
    """
    shard = shard or ContextShard()
    constraints = constraints or LayoutConstraints()
    _check_options(format, tensor_parallel, input_layout)
    real = checked_lengths(lengths, context_length)
    cp = shard.size
    align = math.lcm(tensor_parallel * shard.chunks, constraints.align)
    if format == "thd":
        padded = padded_packed(real, align, constraints.bucket, cp, fp8=fp8)
    else:
        padded = padded_rows(real, align, constraints.bucket, tensor_parallel * cp, fp8=fp8)
    whole = None
    if input_layout == "rows":
        whole = _arrange("bshd", real, padded_rows(real, 1, 1, 1, fp8=False), ContextShard(), context_length)
    elif input_layout == "whole" and cp > 1:
        whole = _arrange(format, real, padded, ContextShard(), context_length)
    return _arrange(format, real, padded, shard, context_length, whole).to(device)


def _check_options(format: Format, tensor_parallel: int, input_layout: InputLayout) -> None:
    where = "plan_layout"
    if format not in ("thd", "bshd"):
        why = f"format is {format!r}"
        raise DataError("Unknown sequence format.", where=where, why=why, fix="use 'thd' or 'bshd'")
    if input_layout not in ("shard", "whole", "rows"):
        why, fix = f"input_layout is {input_layout!r}", "use 'shard', 'whole' or 'rows'"
        raise DataError("Unknown value of input_layout.", where=where, why=why, fix=fix)
    if tensor_parallel < 1:
        fix = "give the size of the tensor-parallel group, or 1 without one"
        why = f"it is {tensor_parallel}"
        raise DataError("The tensor-parallel size must be at least 1.", where=where, why=why, fix=fix)
    if format == "bshd" and input_layout == "rows":
        fix = "use format='thd', or input_layout='whole': a bshd layout has one row for each sequence already"
        raise DataError(
            "input_layout='rows' needs a packed layout, format='thd'.", where=where, why="format is 'bshd'", fix=fix
        )


def _arrange(
    format: Format,
    real: Tensor,
    padded: Tensor,
    shard: ContextShard,
    context_length: int | None,
    whole: SequenceLayout | None = None,
) -> SequenceLayout:
    """Arrange sequences of these real and padded lengths, and take one shard."""
    ends, padded_ends = real.cumsum(0), padded.cumsum(0)
    total, slots = int(ends[-1]), int(padded_ends[-1])
    starts, padded_starts = ends - real, padded_ends - padded

    # Whole slots: where each token lies, which token each slot shows, and its position in its sequence.
    ramp = torch.arange(slots)
    slot_index = _counted(total, starts, 1 + (padded - real)[:-1])
    shown = torch.full((slots,), total).scatter_(0, slot_index, ramp[:total])
    position = _counted(slots, padded_starts, 1 - padded[:-1])

    share = slice(shard.rank * (slots // shard.size), (shard.rank + 1) * (slots // shard.size))
    if shard.size == 1:
        shown, position = shown[share], position[share]
    else:
        order = zigzag_order(padded, shard.size, slots)
        slot_index = inverted(order).index_select(0, slot_index)
        mine = order[share]
        shown, position = shown.index_select(0, mine), position.index_select(0, mine)

    max_seqlen = int(padded.max())
    if context_length is not None and max_seqlen > context_length:
        position = position.clamp(max=context_length - 1)
    rows = real.numel() if format == "bshd" else 1
    return SequenceLayout(
        format=format,
        shard=shard,
        lengths=real,
        padded_lengths=padded,
        cu_seqlens=_cumulative(ends),
        cu_seqlens_padded=_cumulative(padded_ends),
        max_seqlen=max_seqlen,
        position_ids=position.view(rows, -1),
        valid=(shown < total).view(rows, -1),
        token_index=shown,
        slot_index=slot_index,
        whole=whole,
    )


def _counted(size: int, starts: Tensor, steps: Tensor) -> Tensor:
    """Count from 0 by ones, but by ``steps`` where each sequence after the first starts: int64 ``[size]``.

    One buffer and one pass; ``repeat_interleave`` makes three, and their page faults are what a plan costs.
    """
    counted = torch.ones(size, dtype=torch.int64)
    counted[0] = 0
    return counted.scatter_(0, starts[1:], steps).cumsum_(0)


def _cumulative(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def checked_lengths(lengths: Sequence[int] | Tensor, context_length: int | None = None) -> Tensor:
    """Check that there is a sequence, and that no sequence is empty or longer than the model's context.

    Args:
        lengths: Real lengths; a sequence of ints or an int tensor ``[B]``. A tensor on a device is
            copied to the host, once: the only synchronisation that a layout costs.
        context_length: The longest sequence that the model reads; None = no limit.

    Returns:
        int64 ``[B]`` on the host.

    Raises:
        DataError: The shape is wrong, the dtype is not an integer, or a length is below 1 or above ``context_length``.
    """
    real = lengths.cpu() if isinstance(lengths, Tensor) else torch.tensor(lengths)
    if real.ndim != 1 or real.numel() == 0:
        raise DataError(
            "The lengths of the sequences must be a list or one-dimensional tensor, and not empty.",
            where="argument lengths of plan_layout",
            why=f"their shape is {tuple(real.shape)}",
            fix="give one number of tokens for each sequence, for example [5, 3]",
        )
    if real.dtype.is_floating_point or real.dtype.is_complex or real.dtype is torch.bool:
        raise DataError(
            "Lengths must be integers.",
            where="argument lengths of plan_layout",
            why=f"their dtype is {real.dtype}",
            fix="give them as int or torch.int64",
        )
    real = real.to(torch.int64)
    shortest, longest = (int(end) for end in real.aminmax())
    if shortest < 1:
        index = int(real.argmin())
        raise DataError(
            "A sequence has no tokens.",
            where="argument lengths of plan_layout",
            why=f"sequence {index} has length {shortest}",
            fix="give each sequence at least one token",
        )
    if context_length is not None and longest > context_length:
        index = int(real.argmax())
        raise DataError(
            "A sequence is longer than the model's context.",
            where="lengths",
            why=f"sequence {index} has {longest} tokens, but the context has only {context_length}",
            fix="use shorter prompts, or lower rollout.max_new_tokens",
        )
    return real


def padded_packed(real: Tensor, align: int, bucket: int, cp: int, *, fp8: bool) -> Tensor:
    """Return the padded lengths of packed sequences, int64 ``[B]``; the last sequence gets the padding of the sum.

    Args:
        real: int64 ``[B]``, lengths without padding.
        align: Each padded length is a multiple of this many tokens.
        bucket: The sum of the padded lengths is a multiple of this many tokens (:class:`LayoutConstraints`).
        cp: Context-parallel size.
        fp8: Whether to pad for FP8 kernels (:func:`plan_layout`).
    """
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
    """Return the padded lengths where each sequence has a row: int64 ``[B]``, all equal.

    Args:
        real: int64 ``[B]``, lengths without padding.
        align: The row length is a multiple of this many tokens.
        bucket: The row length is also a multiple of this many tokens (:class:`LayoutConstraints`).
        ranks: Tensor-parallel size times context-parallel size: the number of ranks over which FP8 blocks are split.
        fp8: Whether ``B * S`` must be a multiple of 128 tokens on every rank.
    """
    if fp8:
        block = FP8_TOTAL * ranks
        align = math.lcm(block // math.gcd(real.numel(), block), align)
    return torch.full_like(real, round_up(int(real.max()), math.lcm(align, bucket)))


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def zigzag_order(padded: Tensor, size: int, slots: int) -> Tensor:
    """Return which position of the unsharded buffer each slot holds, int64 ``[slots]``; slots are ordered by rank.

    The unsharded buffer has all padded sequences one after the other. Each sequence is cut into ``2 * size`` chunks;
    rank ``r`` holds the chunks ``r`` and ``2 * size - 1 - r`` of each sequence in turn. Nothing waits for the device.

    Args:
        padded: int64 ``[B]``, padded lengths, multiples of ``2 * size``.
        size: Number of context-parallel ranks.
        slots: Sum of ``padded``: length of the unsharded buffer.
    """
    rank = torch.arange(size, device=padded.device)
    chunk = torch.stack([rank, 2 * size - 1 - rank], 1)
    width = padded // (2 * size)
    starts = padded.cumsum(0) - padded
    begins = starts[None, :, None] + chunk[:, None, :] * width[None, :, None]
    widths = width[None, :, None].expand_as(begins).flatten()
    shift = begins.flatten() - (widths.cumsum(0) - widths)
    ramp = torch.arange(slots, device=padded.device)
    return torch.repeat_interleave(shift, widths, output_size=slots).add_(ramp)


def inverted(order: Tensor) -> Tensor:
    """Invert a permutation, int64 ``[K]``. The inverse of :func:`zigzag_order` is the slot of each position."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
