"""``npu_fusion_attention`` forward and backward.

Source: torch_npu 2.13, documentation of ``npu_fusion_attention`` and the checks of op-plugin's
FlashAttentionKernelNpuOpApi.cpp. Computed in float32. Not modelled: dropout, prefix modes (5, 6), sinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator.kernels.attention_masks import Sparsity
from anytron_ascend_simulator.kernels.contract import require

if TYPE_CHECKING:
    from torch import Tensor

HEADS_FIRST = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "TND": (1, 0, 2)}
"""By ``input_layout``: the permutation to ``[B, N, S, D]`` (TND: ``[N, T, D]``), once H is split into N and D."""
MAX_HEADS, MAX_HEAD_SIZE = 256, 768
INVALID_ROWS = 2
"""``inner_precise``: rows without any visible key give zeros. In the other modes the kernel adds a large
negative number to all scores of such a row, and its softmax is uniform over all keys."""


@dataclass(frozen=True)
class Attributes:
    """The plain arguments, in their order."""

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
    """One sequence, or in the layouts with a batch dimension all of them; heads come first.

    Attributes:
        query: float32 ``[..., N, Sq, D]``.
        key: float32 ``[..., Nkv, Skv, D]``.
        value: float32 ``[..., Nkv, Skv, Dv]``.
        masked: bool, broadcastable to ``[..., N, Sq, Skv]``; None = nothing is.
        rows: Where the queries lie in dimension 0 (TND).
        columns: Where the keys lie.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masked: Tensor | None
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))


class Attention:
    """One call: arguments checked, and cut into pieces."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        lengths: list[list[int]],
        attributes: Attributes,
    ) -> None:
        self.attributes = attributes
        require(attributes.layout in HEADS_FIRST, f"input_layout {attributes.layout}: {', '.join(HEADS_FIRST)}")
        require(query.dtype == key.dtype == value.dtype, "query, key and value differ in dtype")
        require(query.dtype in (torch.float16, torch.bfloat16, torch.float32), f"dtype {query.dtype}")
        require(attributes.keep_prob == 1.0, "dropout is not modelled: keep_prob must be 1")
        packed = attributes.layout == "TND"
        require(packed == bool(lengths), "actual_seq_qlen and actual_seq_kvlen belong to layout TND")
        self._sparsity = Sparsity(attributes.sparse_mode, mask, attributes.pre_tokens, attributes.next_tokens, packed)
        self.kv_heads = self._kv_heads(query, key)
        pieces = self._packed_pieces(query, key, value, *lengths) if packed else [self._whole(query, key, value)]
        self.pieces = list(pieces)
        for piece in self.pieces:
            self._check_heads(piece)

    def heads_first(self, tensor: Tensor, heads: int) -> Tensor:
        """A layout's tensor as float32 ``[B, N, S, D]``; TND as ``[N, T, D]``."""
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
            require(query.size(2) % heads == 0, f"hidden size {query.size(2)} is no multiple of head_num {heads}")
            return int(key.size(2) // (query.size(2) // heads))
        axis = 2 if layout == "BSND" else 1
        require(query.size(axis) == heads, f"head_num is {heads}, query has {query.size(axis)} heads")
        return int(key.size(axis))

    def _whole(self, query: Tensor, key: Tensor, value: Tensor) -> Piece:
        q = self.heads_first(query, self.attributes.heads)
        k, v = self.heads_first(key, self.kv_heads), self.heads_first(value, self.kv_heads)
        self._sparsity.check(q.size(0), q.size(1))
        return Piece(q, k, v, self._sparsity.masked(q.size(2), k.size(2)))

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
                rows,
                columns,
            )
            row, column = row_end, column_end

    def _check_heads(self, piece: Piece) -> None:
        heads, size, value_size = piece.query.size(-3), piece.query.size(-1), piece.value.size(-1)
        kv_heads = piece.key.size(-3)
        require(heads % kv_heads == 0 and heads <= MAX_HEADS, f"{heads} query heads for {kv_heads} key/value heads")
        require(piece.key.size(-1) == size, f"query heads of {size}, key heads of {piece.key.size(-1)}")
        require(
            value_size <= size <= MAX_HEAD_SIZE, f"head sizes: Dq {size} >= Dv {value_size}, at most {MAX_HEAD_SIZE}"
        )
        require(piece.key.size(-2) == piece.value.size(-2), "keys and values differ in number")


def _check_ends(name: str, ends: list[int], total: int) -> None:
    require(bool(ends), f"{name} is empty")
    require(ends[0] > 0 or len(ends) == 1, f"{name} has a leading 0: it holds the sequences' ends, {ends[:3]}...")
    real = ends[: len(ends) - next((i for i, end in enumerate(reversed(ends)) if end), 0)]
    require(all(a <= b for a, b in pairwise(real)), f"{name} is not ascending: {ends}")
    require(max(ends) <= total, f"{name} ends at {max(ends)}, there are {total} tokens")


def _scores(piece: Piece, attributes: Attributes) -> tuple[Tensor, Tensor]:
    """Scores with masked ones at -inf, and values, heads of both repeated for grouped queries."""
    group = piece.query.size(-3) // piece.key.size(-3)
    scores = piece.query @ piece.key.repeat_interleave(group, -3).transpose(-1, -2) * attributes.scale
    if piece.masked is not None:
        scores = scores.masked_fill(piece.masked, float("-inf"))
        if attributes.inner_precise != INVALID_ROWS:
            hidden = piece.masked.all(-1, keepdim=True).expand_as(scores)
            scores = torch.where(hidden, torch.zeros(()), scores)
    return scores, piece.value.repeat_interleave(group, -3)


def _forward(piece: Piece, attributes: Attributes) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[..., N, Sq, Dv]``, softmax maximum and sum ``[..., N, Sq, 1]``."""
    scores, values = _scores(piece, attributes)
    maximum = scores.amax(-1, keepdim=True)
    maximum = maximum.masked_fill(maximum == float("-inf"), 0.0)
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.clamp_min(torch.finfo(torch.float32).tiny) @ values, maximum, total


def _backward(
    piece: Piece, attributes: Attributes, cotangent: Tensor, output: Tensor, maximum: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from the *given* softmax statistics and output, on which ring attention relies."""
    scores, values = _scores(piece, attributes)
    group = piece.query.size(-3) // piece.key.size(-3)
    weights = (scores - maximum).exp() / total.clamp_min(torch.finfo(torch.float32).tiny)
    delta = (cotangent * output).sum(-1, keepdim=True)
    d_scores = weights * (cotangent @ values.transpose(-1, -2) - delta) * attributes.scale

    def ungroup(gradient: Tensor) -> Tensor:
        return gradient.unflatten(-3, (-1, group)).sum(-3)

    d_query = d_scores @ piece.key.repeat_interleave(group, -3)
    return d_query, ungroup(d_scores.transpose(-1, -2) @ piece.query), ungroup(weights.transpose(-1, -2) @ cotangent)


def _flash_attention(*arguments: Any) -> None:
    """Both forwards; lengths come with layout TND only."""
    query, key, value, bias, drop, padding, mask, prefix, *lengths = arguments[:-12]
    attributes, (maximum, total, _, output) = Attributes(*arguments[-12:-4]), arguments[-4:]
    _refuse_unmodelled(bias, drop, padding, prefix)
    attention = Attention(query, key, value, mask, lengths, attributes)
    for tensor in (maximum, total, output):
        tensor.zero_()  # rows behind the last sequence of a packed batch
    for piece in attention.pieces:
        found, top, sums = _forward(piece, attributes)
        output[piece.rows].copy_(attention.from_heads_first(found))
        for target, statistic in zip((maximum, total), (top, sums), strict=True):
            place = _statistics(target, piece) if lengths else target
            place.copy_(statistic.expand_as(place))


def _statistics(packed: Tensor, piece: Piece) -> Tensor:
    """A sequence's part of a softmax statistic ``[T, N, 8]``: ``[N, S, 8]``, a view.

    In layout TND the kernel writes each sequence with its heads first, whatever the tensor's shape says
    (``softmax_layout`` changes that); MindSpeed's ring attention reads it so (``flatten_softmax``).
    """
    part = packed[piece.rows]
    return part.view(part.size(1), part.size(0), part.size(2))


def _flash_attention_grad(*arguments: Any) -> None:
    """Both backwards."""
    query, key, value, cotangent, bias, drop, padding, mask, *given = arguments[:-12]
    maximum, total, _, output, prefix, *lengths = given
    attributes, gradients = Attributes(*arguments[-12:-4]), arguments[-4:-1]
    _refuse_unmodelled(bias, drop, padding, prefix)
    attention = Attention(query, key, value, mask, lengths, attributes)
    for gradient in gradients:
        gradient.zero_()
    for piece in attention.pieces:
        statistics = [_statistics(one.contiguous(), piece) if lengths else one for one in (maximum, total)]
        upstream, forward = (attention.heads_first(one[piece.rows], attributes.heads) for one in (cotangent, output))
        found = _backward(piece, attributes, upstream, forward, *(one[..., :1] for one in statistics))
        places = (piece.rows, piece.columns, piece.columns)
        for target, gradient, place in zip(gradients, found, places, strict=True):
            target[place].copy_(attention.from_heads_first(gradient))


def _refuse_unmodelled(bias: Any, drop: Any, padding: Any, prefix: Any) -> None:
    require(bias is None, "pse is not modelled")
    require(drop is None or drop.numel() == 0, "dropout is not modelled")
    require(padding is None, "padding_mask is not supported (torch_npu's documentation)")
    require(not prefix, "prefix is not modelled")


KERNELS = {
    "aclnnFlashAttentionScore": _flash_attention,
    "aclnnFlashAttentionVarLenScore": _flash_attention,
    "aclnnFlashAttentionScoreGrad": _flash_attention_grad,
    "aclnnFlashAttentionUnpaddingScoreGrad": _flash_attention_grad,
}
