"""Rearrange packed sequences into a few dense batches, and back.

With one attention call per sequence, the calls cost more than the attention of short sequences; with one call
over all of them, padded to the longest, padding costs most of the time. So sequences of similar length share a
group ``[n, L]``, padded on the right. The plan depends on the cumulative lengths alone: it is made
once per micro-batch and cached for all layers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from anytron.kernels.contract import AttentionCall


Window = tuple[int, int]

# Query-key pairs that a group may waste on padding: what about three more calls cost. Measured on
# one core with benchmarks/attention.py, forward and backward: 60 us for a call, 13 ns for a pair of 4 heads.
_PAIRS_PER_CALL = 16384

Made = TypeVar("Made")


class MicroBatchCache(Generic[Made]):
    """A cache of one value per micro-batch, keyed by the identity of its cumulative lengths and freed with them."""

    def __init__(self) -> None:
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._made)

    def find(self, call: AttentionCall, facts: Hashable, make: Callable[[], Made]) -> Made:
        """Return the cached value of this micro-batch, or make it.

        Args:
            call: Call whose four tensors of cumulative lengths, with their versions, are the key, so that a change in
                place is noticed.
            facts: Other values on which the cached value depends; only the result for the last ``facts`` is kept.
            make: Function that makes the value.
        """
        key = call.cu_seqlens_q
        assert key is not None, "thd needs cu_seqlens_q"
        others = (call.cu_seqlens_kv, call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded)
        facts = (facts, *(_version(tensor) for tensor in (key, *others)))
        if key in self._made:
            known_facts, references, made = self._made[key]
            same = all(_is(reference, tensor) for reference, tensor in zip(references, others, strict=True))
            if same and known_facts == facts:
                return made  # type: ignore[no-any-return]
        made = make()
        self._made[key] = (facts, [None if tensor is None else weakref.ref(tensor) for tensor in others], made)
        return made


def _version(tensor: Tensor | None) -> int:
    # Tensors made in inference mode keep no version; nothing changes them in place outside of it either.
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _is(reference: weakref.ref[Any] | None, tensor: Tensor | None) -> bool:
    return tensor is None if reference is None else reference() is tensor


class Rows(NamedTuple):
    """Rows to take from a tensor.

    Attributes:
        source: Index of each row, int64 ``[N]``.
        empty: Positions of the result that are zero instead, int64; None = there are none.
    """

    source: Tensor
    empty: Tensor | None

    def take(self, tensor: Tensor) -> Tensor:
        """Return these rows of ``tensor`` ``[M, ...]``, as ``[N, ...]``."""
        taken = tensor.index_select(0, self.source)
        return taken if self.empty is None else taken.index_fill_(0, self.empty, 0)


class _Rearrange(torch.autograd.Function):
    """Take rows; the gradient takes them back.

    Both directions are gathers: every real row has exactly one place on the other side, so that the
    scatter-add which autograd would use (slow, and not deterministic on some devices) is not needed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Rows, back: Rows) -> Tensor:
        ctx.back = back
        return there.take(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.take(grad), None, None


def rearrange(tensor: Tensor, there: Rows | None, back: Rows | None) -> Tensor:
    """Take the rows ``there`` of a tensor; the gradient takes the rows ``back``, the inverse of ``there``."""
    rearranged: Tensor = _Rearrange.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return rearranged


class Side(NamedTuple):
    """How one operand (queries, or keys and values) is moved into the groups and back.

    Attributes:
        grouped: The buffer row of each slot of all groups, one group after the other; None if ``stride`` is set.
        packed: The slot of each buffer row, rows of padding empty; None if ``stride`` is set.
        stride: Set if the slots are the buffer itself, and sequence i starts at ``i * stride``. Then there is
            one group, and views are used instead of copies.
    """

    grouped: Rows | None
    packed: Rows | None
    stride: int | None


class Restriction(NamedTuple):
    """Which pairs (query, key) of a dense batch may attend.

    Attributes:
        visible: bool, broadcastable to ``[n, H, rows, columns]``, True = KEEP. A row that may see no key is
            given all keys, because it would have no softmax (0/0, and NaN on some backends); its result is dropped.
        blind: bool ``[n or 1, 1, rows, 1]``, True = this row may see no key; None if every row may see one.
    """

    visible: Tensor
    blind: Tensor | None

    @classmethod
    def of(cls, forbidden: Tensor, *, sighted: bool = False) -> Restriction:
        """Make a restriction from forbidden pairs.

        Args:
            forbidden: bool, broadcastable to ``[n, H, rows, columns]``, True = MASKED.
            sighted: Whether every row is known to have a key that it may see; then no row is ``blind``.
        """
        if sighted:
            return cls(~forbidden, None)
        blind = forbidden.all(dim=-1, keepdim=True)
        return cls(~forbidden | blind, blind)


@dataclass(frozen=True)
class Group:
    """Sequences that share one dense batch.

    Attributes:
        query_lengths: Real queries of each sequence, int64 ``[n]``.
        key_lengths: Real keys of each sequence, int64 ``[n]``.
        rows: Queries per sequence, with padding.
        columns: Keys per sequence, with padding.
        same: Whether every sequence has as many keys as queries.
        full: Whether every sequence has ``columns`` keys.
        sighted: Whether, without a window, every query sees at least one key, padding queries included.
    """

    query_lengths: Tensor
    key_lengths: Tensor
    rows: int
    columns: int
    same: bool
    full: bool
    sighted: bool
    _restrictions: dict[tuple[bool, Window | None], Restriction | None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.query_lengths.numel()

    def restriction(self, causal: bool, window: Window | None) -> Restriction | None:
        """Return which pairs may attend; None if the kernel's causal flag alone determines them.

        The flag is enough if, in a causal sequence, all padding keys come after every real query: results of padding
        queries are not used.
        """
        asked = (causal, window)
        if asked not in self._restrictions:
            forbidden = self._build(causal, window)
            sighted = self.sighted and window is None
            self._restrictions[asked] = None if forbidden is None else Restriction.of(forbidden, sighted=sighted)
        return self._restrictions[asked]

    def _build(self, causal: bool, window: Window | None) -> Tensor | None:
        """Pairs that may not attend, bool ``[n or 1, 1, rows, columns]``, True = MASKED."""
        if causal and self.same:
            return forbidden_pairs(self.rows, self.columns, causal, window, self.key_lengths.device) if window else None
        if not causal and window is None and self.full:
            return None
        key_lengths = self.key_lengths[:, None, None, None]
        offset = key_lengths - self.query_lengths[:, None, None, None]
        query = torch.arange(self.rows, device=offset.device)[:, None] + offset
        key = torch.arange(self.columns, device=offset.device)
        return (key >= key_lengths) | _out_of_sight(query, key, causal, window)


@dataclass(frozen=True)
class PackedPlan:
    """How the sequences of one micro-batch are grouped."""

    groups: tuple[Group, ...]
    queries: Side
    keys: Side

    def split(self, tensor: Tensor, side: Side, lengths: Sequence[int]) -> list[Tensor]:
        """Split an operand, packed ``[T, ...]``, into one dense batch ``[n, L, ...]`` for each group.

        Args:
            tensor: Queries, keys or values.
            side: ``queries`` or ``keys`` of this plan.
            lengths: L of each group: its ``rows`` for queries, its ``columns`` for keys and values.
        """
        if side.stride is not None:
            (group,), (length,) = self.groups, lengths
            shape = (group.count, side.stride, *tensor.shape[1:])
            return [tensor[: group.count * side.stride].view(shape)[:, :length]]
        slots = rearrange(tensor, side.grouped, side.packed)
        sizes = [group.count * length for group, length in zip(self.groups, lengths, strict=True)]
        parts = torch.split(slots, sizes)
        return [
            part.view(group.count, length, *tensor.shape[1:])
            for group, length, part in zip(self.groups, lengths, parts, strict=True)
        ]

    def join(self, outputs: list[Tensor], total: int) -> Tensor:
        """Join the outputs of groups of sequences, each ``[n, rows, ...]``, into packed ``[total, ...]``.

        Padding is zero.
        """
        if self.queries.stride is None:
            slots = torch.cat([output.flatten(0, 1) for output in outputs])
            return rearrange(slots, self.queries.packed, self.queries.grouped)
        (output,) = outputs
        missing = self.queries.stride - output.shape[1]
        tail = (0, 0) * (output.ndim - 2)
        packed = (torch.nn.functional.pad(output, (*tail, 0, missing)) if missing else output).flatten(0, 1)
        rest = total - packed.shape[0]
        return torch.nn.functional.pad(packed, (*tail, 0, rest)) if rest else packed


def forbidden_pairs(
    rows: int, columns: int, causal: bool, window: Window | None, device: torch.device
) -> Tensor | None:
    """Return pairs that position alone forbids, bool ``[rows, columns]``, True = MASKED; None if all may attend.

    Positions are aligned bottom right: the last query has the position of the last key.
    """
    if not causal and window is None:
        return None
    query = torch.arange(rows, device=device)[:, None] + (columns - rows)
    return _out_of_sight(query, torch.arange(columns, device=device), causal, window)


def _out_of_sight(query: Tensor, key: Tensor, causal: bool, window: Window | None) -> Tensor:
    left, right = window or (-1, -1)
    hidden = torch.zeros_like(query == key)
    if causal:
        hidden = hidden | (key > query)
    if left >= 0:
        hidden = hidden | (key < query - left)
    if right >= 0:
        hidden = hidden | (key > query + right)
    return hidden


_plans: MicroBatchCache[PackedPlan | None] = MicroBatchCache()


def plan_for(call: AttentionCall, query_rows: int, key_rows: int) -> PackedPlan | None:
    """Return the plan for the micro-batch that ``call`` describes; None if no sequence has a query.

    ``query_rows`` and ``key_rows`` are the lengths of the packed buffers, padding included. The first call of a
    micro-batch copies the lengths to the host; later calls find the cached plan.
    """
    return _plans.find(call, (query_rows, key_rows), lambda: _make_plan(call, query_rows, key_rows))


def _make_plan(call: AttentionCall, query_rows: int, key_rows: int) -> PackedPlan | None:
    cu_q, cu_kv = call.cu_seqlens_q, call.cu_seqlens_kv
    cu_q_padded, cu_kv_padded = call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded
    assert cu_q is not None
    device = cu_q.device
    ends_q = cu_q.to("cpu", torch.int64)
    ends_kv = ends_q if cu_kv is None or cu_kv is cu_q else cu_kv.to("cpu", torch.int64)
    starts_q = (ends_q if cu_q_padded is None else cu_q_padded.to("cpu", torch.int64))[:-1]
    starts_kv = (ends_kv if cu_kv_padded is None else cu_kv_padded.to("cpu", torch.int64))[:-1]
    lengths_q, lengths_kv = ends_q.diff(), ends_kv.diff()
    if not bool((lengths_q > 0).any()):
        return None
    if bool((lengths_q == lengths_q[0]).all()) and bool((lengths_kv == lengths_kv[0]).all()):
        stride_q = _regular_stride(starts_q, int(lengths_q[0]), query_rows)
        stride_kv = _regular_stride(starts_kv, int(lengths_kv[0]), key_rows)
        if stride_q is not None and stride_kv is not None and int(lengths_kv[0]) > 0:
            group = _group(lengths_q, lengths_kv, device)
            return PackedPlan((group,), Side(None, None, stride_q), Side(None, None, stride_kv))
    members = _similar(lengths_q, lengths_kv)
    groups = tuple(_group(lengths_q[chosen], lengths_kv[chosen], device) for chosen in members)
    queries = _side(starts_q, lengths_q, members, [group.rows for group in groups], query_rows, device)
    keys = _side(starts_kv, lengths_kv, members, [group.columns for group in groups], key_rows, device)
    return PackedPlan(groups, queries, keys)


def _regular_stride(starts: Tensor, length: int, total: int) -> int | None:
    """Distance of sequence starts in the buffer if it is the same everywhere; None if it is not."""
    stride = int(starts[1]) if starts.numel() > 1 else length
    regular = bool((starts == torch.arange(starts.numel()) * stride).all())
    return stride if regular and stride >= length and starts.numel() * stride <= total else None


def _similar(lengths_q: Tensor, lengths_kv: Tensor) -> list[Tensor]:
    """Indices of the sequences of each group, longest first; sequences without queries are in none."""
    sizes = list(zip(lengths_kv.tolist(), lengths_q.tolist(), strict=True))
    longest_first = sorted((index for index, size in enumerate(sizes) if size[1] > 0), key=sizes.__getitem__)[::-1]
    members: list[list[int]] = []
    columns, rows, waste = 0, 0, 0
    for index in longest_first:
        keys, queries = sizes[index]
        waste += columns * rows - keys * queries
        if not members or waste > _PAIRS_PER_CALL or queries > rows:
            members.append([])
            columns, rows, waste = keys, queries, 0
        members[-1].append(index)
    return [torch.tensor(chosen) for chosen in members]


def _group(lengths_q: Tensor, lengths_kv: Tensor, device: torch.device) -> Group:
    # At least one column: a dense batch without keys is no valid operand.
    columns = max(int(lengths_kv.max()), 1)
    return Group(
        query_lengths=lengths_q.to(device),
        key_lengths=lengths_kv.to(device),
        rows=int(lengths_q.max()),
        columns=columns,
        same=bool((lengths_q == lengths_kv).all()),
        full=bool((lengths_kv == columns).all()),
        sighted=bool((lengths_kv >= lengths_q.clamp(min=1)).all()),
    )


def _side(
    starts: Tensor, lengths: Tensor, members: list[Tensor], widths: list[int], total: int, device: torch.device
) -> Side:
    """Row numbers of both directions, each with the positions that stay empty."""
    sources: list[Tensor] = []
    real: list[Tensor] = []
    for chosen, width in zip(members, widths, strict=True):
        offset = torch.arange(width)
        sources.append((starts[chosen][:, None] + offset).flatten())
        real.append((offset < lengths[chosen][:, None]).flatten())
    source, is_real = torch.cat(sources), torch.cat(real)
    back = torch.full((total,), -1, dtype=torch.int64)
    back[source[is_real]] = torch.arange(source.numel())[is_real]
    return Side(rows_from(source.masked_fill(~is_real, -1), device), rows_from(back, device), None)


def rows_from(source: Tensor, device: torch.device) -> Rows:
    """Make :class:`Rows` from indices on the host, in which -1 stands for an empty row."""
    empty = (source < 0).nonzero()[:, 0]
    return Rows(source.clamp(min=0).to(device), empty.to(device) if empty.numel() else None)
