"""The layout of a micro-batch on one rank: where every token lies, and how per-token values are arranged.

Everything that a model sees per token (ids, labels, positions, routing indices) goes through the same
index, so that the values cannot disagree. Nothing here loops over sequences or waits for the device.
:func:`~anytron.sequences.planning.plan_layout` makes layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from anytron.base.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from anytron.sequences.scopes import ScopeFactory


Format = Literal["thd", "bshd"]
"""How sequences lie in a model's input: ``thd`` packs them one behind the other, ``bshd`` pads each to a row."""

InputLayout = Literal["shard", "whole", "rows"]
"""How a model takes its input: whether the engine or the model shards it for context parallelism and packs it.

``shard``: the engine does both; the model gets its own rank's slots. ``whole``: the model gets the
slots of all shards in order and shards inside, after it has inserted images into the text (mcore-bridge's
vision models). ``rows``: the model gets ``[B, longest]``, right-padded, and packs *and* shards inside
(mbridge's vision models, which want the 2-D map for it). What the model returns are its rank's slots
in every case.
"""

IGNORED_LABEL = -100
"""Label of a position that predicts nothing: padding, the last real token of each sequence, and what is not scored."""

Gather = Callable[[Tensor], Tensor]
"""Concatenate ``[K, ...]`` of all context-parallel shards along dim 0, in rank order. Gradients must
flow through the local slice only (:func:`anytron.sequences.layout.gather_slots`)."""


@dataclass(frozen=True)
class ContextShard:
    """Which part of each sequence one context-parallel rank holds.

    Each padded sequence is cut into ``2 * size`` chunks, and rank ``r`` holds the chunks ``r`` and
    ``2 * size - 1 - r`` (zigzag), so that causal attention costs every rank the same.

    Attributes:
        size: Number of context-parallel ranks.
        rank: Number of this rank among the context-parallel ranks.
        group: Process group of these ranks, to gather outputs; None if a layout is only planned, as in tests that
            simulate all ranks in one process.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise DataError(
                "A context-parallel rank must be from 0 to the context-parallel size minus 1.",
                where="ContextShard",
                why=f"the rank is {self.rank}, the size is {self.size}",
                fix="give the size of the context-parallel group, and this process's rank in it",
            )

    @property
    def chunks(self) -> int:
        """Number of pieces into which each padded sequence is cut."""
        return 2 * self.size if self.size > 1 else 1


@dataclass(frozen=True)
class LayoutConstraints:
    """Requirements of a device on layouts. :meth:`merge` combines the requirements of several plugins.

    Attributes:
        align: Every padded length is a multiple of this many tokens.
        bucket: The length of the packed buffer over all shards (thd), or of a row over all shards (bshd), is a multiple
            of this many tokens, as in verl. The part on one shard need not be a multiple.
    """

    align: int = 1
    bucket: int = 1

    def __post_init__(self) -> None:
        if self.align < 1 or self.bucket < 1:
            raise DataError(
                "align and bucket of LayoutConstraints must be at least 1.",
                why=f"align is {self.align}, bucket is {self.bucket}",
                fix="give 1 where the device has no requirement",
            )

    def merge(self, other: LayoutConstraints) -> LayoutConstraints:
        """Combine two constraints: take the least common multiple of each field."""
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
        position_ids: int64 ``[R, C]``, position of each token in its own sequence; positions of padding continue, up
            to the model's context length (device).
        valid: bool ``[R, C]``, True = real token (device).
        token_index: int64 ``[N]``, flat token in each local slot; ``T`` for padding (device).
        slot_index: int64 ``[T]``, where each flat token lies in the concatenation of all shards'
            slots, ``shard.size * N`` long (device).
        whole: Layout of the arguments of a model that shards or packs by itself; None if the engine
            does so. Use :attr:`taken`.
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
    whole: SequenceLayout | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences, B."""
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        """Number of real tokens over all shards, T."""
        return self.slot_index.numel()

    @cached_property
    def longest(self) -> int:
        """Number of real tokens of the longest sequence."""
        return int(self.lengths.max())

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C) of the local slots, the shape of the model's output."""
        rows, columns = self.valid.shape
        return rows, columns

    @property
    def taken(self) -> SequenceLayout:
        """The layout of the model's arguments: ids, positions and places of images.

        This layout itself, unless the model shards or packs inside. Labels and everything else that
        meets the model's *output* go through this layout.
        """
        return self if self.whole is None else self.whole

    def pack(self, values: Tensor, fill: float | bool = 0) -> Tensor:
        """Arrange flat per-token values for this rank.

        Args:
            values: ``[T, ...]``, any dtype, on the layout's device; routing indices ``[T, L, K]``, for
                example.
            fill: Value of padding slots.

        Returns:
            ``[R, C, ...]``, same dtype.

        Raises:
            DataError: ``values`` does not have exactly T entries.
        """
        if values.ndim == 0 or values.shape[0] != self.num_tokens:
            raise _misfit(
                "The number of values does not match the layout.",
                "pack",
                f"{_count(values)} for {self.num_tokens} tokens",
                "give one entry for each real token, in the order of the sequences",
            )
        return self._show(torch.cat([values, values.new_full((1, *values.shape[1:]), fill)]))

    def pack_axes(self, values: Tensor, fill: float | bool = 0) -> Tensor:
        """Arrange values whose last dimension is tokens, such as the three position axes of a vision model's mrope.

        Args:
            values: ``[A, T]``.
            fill: Value of padding slots.

        Returns:
            ``[A, R, C]``.

        Raises:
            DataError: ``values`` is not ``[A, T]``.
        """
        if values.ndim != 2 or values.shape[1] != self.num_tokens:
            why = f"shape {tuple(values.shape)}, expected (A, {self.num_tokens})"
            fix = "give one column for each real token, in the order of the sequences"
            raise _misfit("The number of values does not match the layout.", "pack_axes", why, fix)
        return self.pack(values.t(), fill).permute(2, 0, 1).contiguous()

    def unpack(self, values: Tensor, gather: Gather | None = None) -> Tensor:
        """Undo :meth:`pack`: return flat values without padding, in the order of the input sequences.

        Args:
            values: ``[R, C, ...]`` of this rank.
            gather: Function from :func:`gather_slots`, required if ``shard.size > 1``; None = there is one shard.

        Returns:
            ``[T, ...]``.

        Raises:
            DataError: The shape is not this layout's, or a gather is needed and missing or incomplete.
        """
        return self._of_all_shards(self._slots(values, "unpack"), gather, "unpack").index_select(0, self.slot_index)

    def next_tokens(self, tokens: Tensor, ahead: int = 1, *, ignored: Tensor | None = None) -> Tensor:
        """Return the labels: at each position the real token that follows in its sequence.

        Args:
            tokens: int64 ``[T]``.
            ahead: Distance of that token; 1 = the next one.
            ignored: bool ``[T]``, True = this token is not used as a label; None = every token is.

        Returns:
            int64 ``[R, C]``; :data:`IGNORED_LABEL` where an ignored token follows, at the last ``ahead`` real tokens of
            a sequence and in padding.

        Raises:
            DataError: ``tokens`` has not exactly T entries.
        """
        if tuple(tokens.shape) != (self.num_tokens,):
            why = f"shape {tuple(tokens.shape)}, expected ({self.num_tokens},)"
            fix = "give one token id for each real token, in the order of the sequences"
            raise _misfit("The number of tokens does not match the layout.", "next_tokens", why, fix)
        if ignored is not None:
            tokens = tokens.masked_fill(ignored, IGNORED_LABEL)
        # Shifted, with an entry for padding at the end.
        following = torch.cat([tokens[ahead:], tokens.new_full((min(ahead, self.num_tokens) + 1,), IGNORED_LABEL)])
        ends = self.cu_seqlens[1:].long()
        for back in range(1, ahead + 1):
            # In a shorter sequence this is a position of an earlier one, where the label is ignored as well.
            following.index_fill_(0, (ends - back).clamp(min=0), IGNORED_LABEL)
        return self._show(following)

    def to(self, device: torch.device | str) -> SequenceLayout:
        """Copy the device fields to ``device``."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("cu_seqlens", "cu_seqlens_padded", "position_ids", "valid", "token_index", "slot_index")
        }
        return replace(self, **moved, whole=self.whole and self.whole.to(device))

    def _show(self, values_and_padding: Tensor) -> Tensor:
        """``[T + 1, ...]``, padding's value last -> ``[R, C, ...]``."""
        # index_select: three times as fast as indexing with brackets.
        shown = values_and_padding.index_select(0, self.token_index)
        return shown.view(*self.shape, *values_and_padding.shape[1:])

    def _slots(self, values: Tensor, where: str) -> Tensor:
        if tuple(values.shape[:2]) != self.shape:
            why = f"the output begins with the dimensions {tuple(values.shape[:2])}, but the layout has {self.shape}"
            fix = "give the model's output for this layout's own inputs, [rows, columns, ...]"
            raise _misfit("The shape of the model's output does not match the layout.", where, why, fix)
        return values.flatten(0, 1)

    def _of_all_shards(self, local: Tensor, gather: Gather | None, where: str) -> Tensor:
        if self.shard.size == 1:
            return local
        if gather is None:
            raise _misfit(
                "A context-parallel layout needs a gather function.",
                where,
                f"there are {self.shard.size} shards, but gather is None",
                "pass gather=gather_slots(group) of anytron.sequences.layout, with the context-parallel group",
            )
        gathered = gather(local)
        expected = self.shard.size * local.shape[0]
        if gathered.shape[0] != expected:
            why = f"it returned {gathered.shape[0]} slots, but {self.shard.size} ranks have {expected}"
            fix = "let gather concatenate the slots of all ranks along dimension 0, as gather_slots does"
            raise _misfit("gather did not return the slots of all context-parallel ranks.", where, why, fix)
        return gathered


def _count(values: Tensor) -> str:
    return f"{values.shape[0]} values" if values.ndim else "a single number"


def _misfit(what: str, where: str, why: str, fix: str) -> DataError:
    return DataError(what, where=f"SequenceLayout.{where}", why=why, fix=fix)


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of the model for one micro-batch on this rank, padding included.

    ``preprocess_sequences`` receives it and may return a changed copy (``dataclasses.replace``).

    Attributes:
        layout: The layout of all tensors here.
        input_ids: int64 ``[R, C]`` of ``layout.taken`` (whole sequences for models that shard inside);
            padding holds 0.
        position_ids: int64 ``[R, C]`` of ``layout`` (of ``layout.taken`` where the model packs rows itself), or
            ``[3, R, C]`` for a model with mrope: temporal, vertical, horizontal.
        labels: int64 ``[R, C]`` of ``layout``, as the model's output; the next real token, -100
            (``anytron.sequences.layout.IGNORED_LABEL``) elsewhere.
        scope: Factory of a context manager that is entered around this micro-batch's forward pass and around
            each recomputation of it; None if no plugin needs one. A plugin adds its own with
            ``scopes.combine(inputs.scope, mine)``.
        extra: Further arguments of the model's forward, by name (images of a VLM, for example).
    """

    layout: SequenceLayout
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    scope: ScopeFactory | None = None
    extra: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))


def gather_slots(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Make the ``gather`` that :meth:`SequenceLayout.unpack` asks for.

    The returned function takes this rank's slots ``[N, ...]`` and gives all ranks' ``[size * N, ...]``
    in rank order. The gradient flows through the local slice only: each rank's loss sees all
    tokens, and the gradients of the parameters are summed over context-parallel ranks afterwards:
    a gradient through other ranks' slices would count every token ``size`` times.

    Args:
        group: The context-parallel process group.
    """

    def gather(slots: Tensor) -> Tensor:
        local = slots.detach().contiguous()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
        parts[dist.get_rank(group)] = slots
        return torch.cat(parts)

    return gather
