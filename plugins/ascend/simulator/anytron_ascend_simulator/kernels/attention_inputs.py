"""The arguments of ``npu_fusion_attention``, checked and cut into sequences; True = MASKED everywhere.

Source: torch_npu 2.13, documentation of ``npu_fusion_attention`` and the checks of op-plugin's
FlashAttentionKernelNpuOpApi.cpp; for sinks CANN 8.5.0, documentation and checks of
``aclnnFlashAttentionVarLenScoreV5``, ``aclnnFlashAttentionScoreV3`` and their gradients. Not modelled: prefix modes
(5, 6).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator.kernels.contract import ContractError, require
from anytron_ascend_simulator.kernels.dropout import DropMask

if TYPE_CHECKING:
    from torch import Tensor


UNLIMITED = 2147483647
"""Default of ``pre_tockens`` and ``next_tockens``."""
COMPRESSED = 2048
"""Side of a compressed mask."""
COMPRESSED_MODES = frozenset({2, 3, 4, 7, 8})
TND_ONLY_MODES = frozenset({7, 8})


@dataclass(frozen=True)
class Sparsity:
    """An ``atten_mask`` with a ``sparse_mode``: its meaning, and the documented requirements.

    Attributes:
        mode: ``sparse_mode``.
        mask: bool or uint8, 1 = masked; None = everything is seen, with any mode and windows.
        before: ``pre_tockens``: keys that a query sees before its own position.
        after: ``next_tockens``: keys that a query sees after its own position.
        packed: Whether the layout is TND.
    """

    mode: int
    mask: Tensor | None
    before: int
    after: int
    packed: bool

    def check(self, batch: int, heads: int) -> None:
        """Check mode, dtype and shape; ``batch`` and ``heads`` are those of the queries."""
        if self.mask is None:
            return
        require(self.mode in (0, 1, *COMPRESSED_MODES), f"sparse_mode {self.mode} is not modelled (0-4, 7, 8 are)")
        require(self.packed or self.mode not in TND_ONLY_MODES, f"sparse_mode {self.mode} is for layout TND only")
        require(self.mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {self.mask.dtype}, not bool or uint8")
        shape = tuple(self.mask.shape)
        if self.mode in COMPRESSED_MODES:
            self._check_compressed(shape)
            return
        if self.packed:
            require(len(shape) == 2, f"atten_mask is {shape}, not [maxSq, maxSkv] as in layout TND")
            return
        allowed = shape[:-2] in ((), (1, 1), (batch, 1), (batch, heads))
        require(allowed, f"atten_mask is {shape}, not [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] or [Sq, Skv]")

    def _check_compressed(self, shape: tuple[int, ...]) -> None:
        require(
            shape[-2:] == (COMPRESSED, COMPRESSED) and all(size == 1 for size in shape[:-2]),
            f"sparse_mode {self.mode} needs the compressed {COMPRESSED}x{COMPRESSED} mask, not {shape}",
        )
        assert self.mask is not None
        triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
        if not torch.equal(self.mask.reshape(COMPRESSED, COMPRESSED).bool(), triangle):
            raise ContractError("the compressed mask must be the upper triangle without diagonal, 1 = masked")

    def masked(self, queries: int, keys: int, sequence: int = 0, sequences: int = 1) -> Tensor | None:
        """Masked pairs of one sequence of a packed batch: bool ``[Sq, Skv]`` or ``[*, *, Sq, Skv]``; None = no mask."""
        if self.mask is None:
            return None
        if self.mode in (0, 1):
            return self._explicit(queries, keys)
        mode, after = self.mode, self.after
        if mode == 7:  # a shard of right-down causal: the last sequence is a band
            mode, after = (4, after) if sequence == sequences - 1 else (3, 0)
        elif mode == 8:  # a shard of left-up causal: the first one is
            mode, after = (4, after) if sequence == 0 else (2, 0)
        query, key = torch.arange(queries)[:, None], torch.arange(keys)[None]
        shift = keys - queries
        if mode == 2:
            return key > query
        if mode == 3:
            return key > query + shift
        return (key < query + shift - self.before) | (key > query + shift + after)

    def _explicit(self, queries: int, keys: int) -> Tensor:
        assert self.mask is not None
        size = tuple(self.mask.shape[-2:])
        fits = size[0] >= queries and size[1] >= keys if self.packed else size == (queries, keys)
        require(fits, f"the last dimensions of atten_mask are {size}, but there are {queries} queries and {keys} keys")
        mask = self.mask[..., :queries, :keys].bool()
        limited = self.before < UNLIMITED or self.after < UNLIMITED
        if self.mode == 0 and limited:
            query, key = torch.arange(queries)[:, None], torch.arange(keys)[None]
            outside = (key < query - self.before) | (key > query + self.after)
            require(
                bool((mask | ~outside).all()),
                f"sparse_mode 0: the mask keeps keys outside of the window of pre_tockens={self.before} and "
                f"next_tockens={self.after}, which the kernel does not look at",
            )
        return mask


HEADS_FIRST = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "TND": (1, 0, 2)}
"""By ``input_layout``: the permutation to ``[B, N, S, D]`` (TND: ``[N, T, D]``), once H is split into N and D."""
MAX_HEADS, MAX_HEAD_SIZE = 256, 768
INVALID_ROWS = 2
"""``inner_precise``: rows without any visible key give zeros. In the other modes the kernel adds a large
negative number to all scores of such a row, and its softmax is uniform over all keys."""


@dataclass(frozen=True)
class Attributes:
    """The arguments from the scale to ``sparse_mode`` of the ``aclnnFlashAttention...`` functions, in their order.

    ``npu_fusion_attention`` has another order.
    """

    scale: float
    keep_prob: float
    pre_tokens: int
    next_tokens: int
    heads: int
    layout: str
    inner_precise: int
    sparse_mode: int


@dataclass(frozen=True)
class Piece:
    """The inputs of one sequence, or of the whole batch in layouts with a batch dimension; heads come before rows.

    Attributes:
        query: float32 ``[..., N, Sq, D]``.
        key: float32 ``[..., Nkv, Skv, D]``.
        value: float32 ``[..., Nkv, Skv, Dv]``.
        masked: bool, broadcastable to ``[..., N, Sq, Skv]``; None = nothing is masked.
        kept: bool ``[..., N, Sq, Skv]``, True = dropout keeps the pair; None = no dropout.
        rows: Rows of the queries in dimension 0 (TND).
        columns: Rows of the keys in dimension 0 (TND).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masked: Tensor | None
    kept: Tensor | None
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))


class Attention:
    """One call of the operator: its arguments, checked and cut into pieces.

    Args:
        query: Queries, in the layout of ``attributes``.
        key: Keys, in the same layout.
        value: Values, in the same layout.
        mask: ``atten_mask``.
        lengths: Ends of the sequences, of queries and of keys, in layout TND only.
        attributes: The arguments that are not tensors.
        drop: uint8, the bits that dropout keeps; None = no dropout.
        sinks: float32 ``[N]``, a logit per head that joins the denominator; None = there are none.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        lengths: list[list[int]],
        attributes: Attributes,
        drop: Tensor | None,
        sinks: Tensor | None,
    ) -> None:
        self.attributes = attributes
        require(
            attributes.layout in HEADS_FIRST,
            f"input_layout is {attributes.layout}, not one of {', '.join(HEADS_FIRST)}",
        )
        require(query.dtype == key.dtype == value.dtype, "query, key and value differ in dtype")
        require(query.dtype in (torch.float16, torch.bfloat16, torch.float32), f"query is {query.dtype}")
        self._drop = DropMask(drop, attributes.keep_prob)
        self.sinks = _check_sinks(sinks, attributes.heads)
        packed = attributes.layout == "TND"
        require(
            packed == bool(lengths), "actual_seq_qlen and actual_seq_kvlen are needed in layout TND, and only there"
        )
        self._sparsity = Sparsity(attributes.sparse_mode, mask, attributes.pre_tokens, attributes.next_tokens, packed)
        self.kv_heads = self._kv_heads(query, key)
        pieces = self._packed_pieces(query, key, value, *lengths) if packed else [self._whole(query, key, value)]
        self.pieces = list(pieces)
        for piece in self.pieces:
            self._check_heads(piece)

    def heads_first(self, tensor: Tensor, heads: int) -> Tensor:
        """Convert a tensor in the layout to float32 ``[B, N, S, D]``; in TND to ``[N, T, D]``."""
        wide, layout = tensor.float(), self.attributes.layout
        if layout in ("BSH", "SBH"):
            wide = wide.unflatten(2, (heads, -1))
        return wide.permute(*HEADS_FIRST[layout])

    def from_heads_first(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`heads_first`."""
        layout = self.attributes.layout
        axes = HEADS_FIRST[layout]
        given = tensor.permute(*(axes.index(axis) for axis in range(len(axes))))
        return given.flatten(2) if layout in ("BSH", "SBH") else given

    def _kv_heads(self, query: Tensor, key: Tensor) -> int:
        layout, heads = self.attributes.layout, self.attributes.heads
        if layout in ("BSH", "SBH"):
            require(query.size(2) % heads == 0, f"hidden size {query.size(2)} is not a multiple of head_num {heads}")
            return int(key.size(2) // (query.size(2) // heads))
        axis = 2 if layout == "BSND" else 1
        require(query.size(axis) == heads, f"head_num is {heads}, but query has {query.size(axis)} heads")
        return int(key.size(axis))

    def _whole(self, query: Tensor, key: Tensor, value: Tensor) -> Piece:
        q = self.heads_first(query, self.attributes.heads)
        k, v = self.heads_first(key, self.kv_heads), self.heads_first(value, self.kv_heads)
        self._sparsity.check(q.size(0), q.size(1))
        kept = self._drop.take(q.size(0), q.size(1), q.size(2), k.size(2))
        return Piece(q, k, v, self._sparsity.masked(q.size(2), k.size(2)), kept)

    def _packed_pieces(
        self, query: Tensor, key: Tensor, value: Tensor, query_ends: list[int], key_ends: list[int]
    ) -> Any:
        _check_ends("actual_seq_qlen", query_ends, query.size(0))
        _check_ends("actual_seq_kvlen", key_ends, key.size(0))
        require(len(query_ends) == len(key_ends), "actual_seq_qlen and actual_seq_kvlen differ in length")
        self._sparsity.check(len(query_ends), self.attributes.heads)
        row = column = 0
        for sequence, (row_end, column_end) in enumerate(zip(query_ends, key_ends, strict=True)):
            if row_end <= row:  # an empty sequence, or a zero at the end for one that is left out
                continue
            masked = self._sparsity.masked(row_end - row, column_end - column, sequence, len(query_ends))
            if masked is not None and self.attributes.inner_precise != INVALID_ROWS:
                require(not bool(masked.all(-1).any()), "layout TND: a row of the mask is fully masked")
            rows, columns = slice(row, row_end), slice(column, column_end)
            yield Piece(
                self.heads_first(query[rows], self.attributes.heads),
                self.heads_first(key[columns], self.kv_heads),
                self.heads_first(value[columns], self.kv_heads),
                masked,
                self._drop.take(self.attributes.heads, row_end - row, column_end - column),
                rows,
                columns,
            )
            row, column = row_end, column_end

    def _check_heads(self, piece: Piece) -> None:
        heads, size, value_size = piece.query.size(-3), piece.query.size(-1), piece.value.size(-1)
        kv_heads = piece.key.size(-3)
        require(
            heads % kv_heads == 0 and heads <= MAX_HEADS,
            f"{heads} query heads must be a multiple of {kv_heads} key/value heads, and at most {MAX_HEADS}",
        )
        require(piece.key.size(-1) == size, f"query heads have the size {size}, but key heads {piece.key.size(-1)}")
        require(
            value_size <= size <= MAX_HEAD_SIZE,
            f"value heads ({value_size}) must not be larger than query heads ({size}), nor these than {MAX_HEAD_SIZE}",
        )
        require(piece.key.size(-2) == piece.value.size(-2), "keys and values differ in number")


def _check_ends(name: str, ends: list[int], total: int) -> None:
    require(bool(ends), f"{name} is empty")
    require(
        ends[0] > 0 or len(ends) == 1,
        f"{name} has a leading 0, but must hold the ends of the sequences only: {ends[:3]}...",
    )
    real = ends[: len(ends) - next((i for i, end in enumerate(reversed(ends)) if end), 0)]
    require(all(a <= b for a, b in pairwise(real)), f"{name} is not ascending: {ends}")
    require(max(ends) <= total, f"{name} ends at {max(ends)}, but there are {total} tokens")


def _check_sinks(sinks: Tensor | None, heads: int) -> Tensor | None:
    if sinks is not None:
        require(sinks.dtype == torch.float32, f"sink is {sinks.dtype}, not float32")
        require(tuple(sinks.shape) == (heads,), f"sink is {tuple(sinks.shape)}, not [head_num] = ({heads},)")
    return sinks
