"""Plan how ragged sequences are arranged for a model, once, and move values through that plan.

Everything that a model sees per token (ids, labels, loss masks, positions, routing indices) goes
through the same index, so that they cannot disagree. Nothing here loops over sequences, and the
whole plan is made on the host from host lengths: no device synchronisation.

The alignment rules are those of Megatron-Core's context parallelism and of Transformer Engine's
FP8 kernels, as verl, ms-swift and slime use them (see docs/explanation/layouts.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from anytron.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

Format = Literal["thd", "bshd"]
Partition = Literal["zigzag", "contiguous"]

IGNORED_LABEL = -100
"""Label of a position that predicts nothing: padding and the last real token of each sequence."""


@dataclass(frozen=True)
class ContextShard:
    """Which part of each sequence one context-parallel rank holds.

    ``zigzag`` cuts each padded sequence into ``2 * size`` chunks and gives rank ``r`` the chunks
    ``r`` and ``2 * size - 1 - r``, so that causal attention costs every rank the same.
    ``contiguous`` gives rank ``r`` the ``r``-th of ``size`` equal slices (of the packed buffer in
    thd, of every row in bshd).

    ``group`` holds the context-parallel ranks; whoever unpacks gathers over it. It is None where a
    layout is only planned, as in tests that simulate all ranks in one process.
    """

    size: int = 1
    rank: int = 0
    partition: Partition = "zigzag"
    group: ProcessGroup | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise DataError("Impossible context-parallel shard.", why=f"rank {self.rank} of size {self.size}")


@dataclass(frozen=True)
class LayoutConstraints:
    """What a device asks of a layout. Answers of several plugins are merged with :meth:`merge`.

    Attributes:
        align: Every padded length is a multiple of this many tokens.
        bucket: The total of the local layout (thd), or the row length (bshd), is a multiple of this.
    """

    align: int = 1
    bucket: int = 1

    def merge(self, other: LayoutConstraints) -> LayoutConstraints:
        """Satisfy both: the least common multiple of each field."""
        return LayoutConstraints(math.lcm(self.align, other.align), math.lcm(self.bucket, other.bucket))


@dataclass(frozen=True)
class SequenceLayout:
    """How ``B`` ragged sequences lie in the model's input on one context-parallel rank. Immutable.

    Attributes:
        format: ``thd`` (packed, one row) or ``bshd`` (one right-padded row per sequence).
        shard: The context-parallel shard that the local fields describe.
        lengths: int64 ``[B]``, real tokens per sequence (host).
        padded_lengths: int64 ``[B]``, tokens per sequence after padding, over all shards (host).
        cu_seqlens: int32 ``[B + 1]``, leading 0, cumulative real lengths over all shards (device).
        cu_seqlens_padded: int32 ``[B + 1]``, leading 0, cumulative padded lengths (device).
        max_seqlen: Longest padded sequence, over all shards.
        position_ids: int64 ``[R, C]``, position in its own sequence; padding counts on (device).
        valid: bool ``[R, C]``, True = real token (device).
        token_index: int64 ``[N]``, flat token that each local slot shows; ``T`` for padding (device).
        slot_index: int64 ``[T]``, where each flat token lies in the concatenation of all shards'
            slots, ``shard.size * N`` long (device).
    """

    format: Format
    shard: ContextShard
    lengths: Tensor
    padded_lengths: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int
    position_ids: Tensor
    valid: Tensor
    token_index: Tensor
    slot_index: Tensor

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        """T, real tokens over all shards."""
        return self.slot_index.numel()

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C) of the local model input."""
        rows, columns = self.valid.shape
        return rows, columns

    def pack(self, values: Tensor, fill: float | bool = 0) -> Tensor:
        """Arrange flat per-token values for this rank.

        Args:
            values: ``[T, ...]``, any dtype, on the layout's device.
            fill: Value of padding slots.

        Returns:
            ``[R, C, ...]``, same dtype.

        Raises:
            DataError: ``values`` has not exactly T entries.
        """
        if values.shape[0] != self.num_tokens:
            raise DataError(
                "Values do not fit the layout.",
                where="SequenceLayout.pack",
                why=f"{values.shape[0]} values for {self.num_tokens} tokens",
            )
        padding = values.new_full((1, *values.shape[1:]), fill)
        return torch.cat([values, padding])[self.token_index].view(*self.shape, *values.shape[1:])

    def unpack(self, values: Tensor, gather: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Undo :meth:`pack`: flat values without padding, in the order of the input sequences.

        Args:
            values: ``[R, C, ...]`` of this rank.
            gather: With ``shard.size > 1``, concatenates the ``[N, ...]`` slots of all shards along
                dim 0, in rank order. Gradients must flow through the local slice only.

        Returns:
            ``[T, ...]``.

        Raises:
            DataError: The shape is not this layout's, or a gather is needed and missing.
        """
        if tuple(values.shape[:2]) != self.shape:
            raise DataError(
                "Model output does not fit the layout.",
                where="SequenceLayout.unpack",
                why=f"output has leading shape {tuple(values.shape[:2])}, the layout {self.shape}",
            )
        slots = values.flatten(0, 1)
        if self.shard.size > 1:
            if gather is None:
                raise DataError("A context-parallel layout needs a gather to unpack.", where="SequenceLayout.unpack")
            slots = gather(slots)
        return slots[self.slot_index]

    def next_tokens(self, tokens: Tensor) -> Tensor:
        """Labels: at each position the sequence's next real token.

        Args:
            tokens: int64 ``[T]``.

        Returns:
            int64 ``[R, C]``; :data:`IGNORED_LABEL` at the last real token of a sequence and in padding.
        """
        return self.pack(next_in_sequence(tokens, self.cu_seqlens), fill=IGNORED_LABEL)

    def to(self, device: torch.device | str) -> SequenceLayout:
        """Copy the device fields to ``device``."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("cu_seqlens", "cu_seqlens_padded", "position_ids", "valid", "token_index", "slot_index")
        }
        return replace(self, **moved)


def next_in_sequence(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Shift flat tokens left by one within each sequence.

    Args:
        tokens: int64 ``[T]``.
        cu_seqlens: int ``[B + 1]``, real cumulative lengths with a leading 0.

    Returns:
        int64 ``[T]``, :data:`IGNORED_LABEL` at the last token of each sequence.
    """
    shifted = torch.roll(tokens, -1)
    shifted[cu_seqlens[1:].long() - 1] = IGNORED_LABEL
    return shifted


def plan_layout(
    lengths: Sequence[int] | Tensor,
    *,
    format: Format = "thd",
    tensor_parallel: int = 1,
    shard: ContextShard | None = None,
    constraints: LayoutConstraints | None = None,
    fp8: bool = False,
    max_seqlen: int | None = None,
    device: torch.device | str = "cpu",
) -> SequenceLayout:
    """Turn lengths into a layout.

    Each sequence is padded on the right to a multiple of ``tensor_parallel`` (context parallelism
    off), ``2 * tensor_parallel * cp`` (zigzag) or ``tensor_parallel * cp`` (contiguous), and of
    ``constraints.align``. FP8 (Transformer Engine's block sizes) asks in thd for multiples of 16 per
    sequence and of 128 alignments in total; in bshd the row length grows until ``B * S`` is such a
    multiple. What the total lacks is added to the last sequence.

    Args:
        lengths: Real lengths, each at least 1; a sequence of ints or an int tensor ``[B]`` on the host.
        format: ``thd`` or ``bshd``.
        tensor_parallel: Tensor-parallel size (sequence parallelism splits the rows by it).
        shard: The context-parallel shard; default: no context parallelism.
        constraints: What the platform asks for.
        fp8: Pad for FP8 kernels.
        max_seqlen: bshd only: row length to reach at least (for example a mini-batch's maximum).
        device: Where the index tensors go.

    Returns:
        The layout of ``shard``.

    Raises:
        DataError: No sequence, a length below 1, or a format that does not exist.
    """
    shard = shard or ContextShard()
    constraints = constraints or LayoutConstraints()
    real = _checked_lengths(lengths)
    cp = shard.size
    chunks = 2 * cp if cp > 1 and shard.partition == "zigzag" else cp
    align = math.lcm(tensor_parallel * chunks, constraints.align)
    if format == "thd":
        padded = _padded_thd(real, align, constraints.bucket, cp, fp8)
        rows = 1
    elif format == "bshd":
        padded = _padded_bshd(real, align, constraints.bucket, tensor_parallel * cp, fp8, max_seqlen)
        rows = real.numel()
    else:
        raise DataError("Unknown sequence format.", why=f"{format!r}", fix="use 'thd' or 'bshd'")

    position, token = _slots(real, padded, shard, per_row=format == "bshd")
    total = int(real.sum())
    local = position.shape[1]
    slot_index = torch.empty(total + 1, dtype=torch.int64)
    slot_index[token.flatten()] = torch.arange(cp * local)
    columns = local // rows
    layout = SequenceLayout(
        format=format,
        shard=shard,
        lengths=real,
        padded_lengths=padded,
        cu_seqlens=_cumulative(real),
        cu_seqlens_padded=_cumulative(padded),
        max_seqlen=int(padded.max()),
        position_ids=position[shard.rank].view(rows, columns),
        valid=(token[shard.rank] < total).view(rows, columns),
        token_index=token[shard.rank],
        slot_index=slot_index[:total],
    )
    return layout.to(device)


def _checked_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    real = lengths.to("cpu", torch.int64) if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)
    if real.ndim != 1 or real.numel() == 0:
        raise DataError("A layout needs at least one sequence.", where="plan_layout", why=f"shape {tuple(real.shape)}")
    if int(real.min()) < 1:
        index = int(real.argmin())
        raise DataError(
            "A sequence has no tokens.", where="plan_layout", why=f"sequence {index} has length {int(real[index])}"
        )
    return real


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _padded_thd(real: Tensor, align: int, bucket: int, cp: int, fp8: bool) -> Tensor:
    per_sequence = math.lcm(16, align) if fp8 else align
    padded = -(-real // per_sequence) * per_sequence
    total = int(padded.sum())
    # The bucket counts the packed buffer of all shards; the deficit must keep the last sequence aligned.
    whole = math.lcm(bucket, cp) if bucket > 1 else 1
    if fp8:
        whole = math.lcm(whole, 128 * align)
    padded[-1] += _round_up(total, math.lcm(whole, per_sequence)) - total if whole > 1 else 0
    return padded


def _padded_bshd(real: Tensor, align: int, bucket: int, ranks: int, fp8: bool, max_seqlen: int | None) -> Tensor:
    longest = max(int(real.max()), max_seqlen or 0)
    if fp8:
        block = 128 * ranks
        align = math.lcm(block // math.gcd(real.numel(), block), align)
    return torch.full_like(real, _round_up(longest, math.lcm(align, bucket)))


def _slots(real: Tensor, padded: Tensor, shard: ContextShard, *, per_row: bool) -> tuple[Tensor, Tensor]:
    """Positions and flat tokens of every slot of every shard, each int64 ``[cp, N]``."""
    cp = shard.size
    count = real.numel()
    starts = torch.cumsum(real, 0) - real
    total = int(real.sum())
    if cp > 1 and shard.partition == "contiguous" and not per_row:
        sequence = torch.repeat_interleave(torch.arange(count), padded)
        position = torch.arange(int(padded.sum())) - torch.repeat_interleave(torch.cumsum(padded, 0) - padded, padded)
        sequence, position = sequence.view(cp, -1), position.view(cp, -1)
    else:
        local = padded // cp
        sequence = torch.repeat_interleave(torch.arange(count), local).expand(cp, -1)
        offset = torch.arange(int(local.sum())) - torch.repeat_interleave(torch.cumsum(local, 0) - local, local)
        rank = torch.arange(cp)[:, None]
        if cp > 1 and shard.partition == "zigzag":
            chunk = (padded // (2 * cp))[sequence[0]]
            second = offset >= chunk
            position = torch.where(second, (2 * cp - 1 - rank) * chunk + offset - chunk, rank * chunk + offset)
        else:
            position = rank * local[sequence[0]] + offset
    token = torch.where(position < real[sequence], starts[sequence] + position, total)
    return position, token


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
