"""``npu_fusion_attention`` as an attention kernel.

The kernel needs a mask tensor with every mode that masks. Sequences are right-aligned (the last query is at the
last key), so causality is ``sparse_mode`` 3 with the compressed mask, a window is mode 4 with the
same mask, and only an explicit mask has full size (mode 1).

Source: torch_npu 2.13, documentation of ``npu_fusion_attention``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from anytron import PlatformError
from anytron.kernels import MicroBatchCache, forbidden_pairs, is_causal, zeros_from
from anytron.kernels import make_attention as make_neutral

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.kernels import AttentionCall, AttentionKernel, AttentionSpec

COMPRESSED = 2048
"""Side of a compressed mask."""
UNLIMITED = 2147483647
"""``pre_tockens`` and ``next_tockens`` that hide nothing (their default)."""
MAX_HEADS = 256
"""Largest number of query heads, which must be a multiple of the number of key/value heads."""
MAX_HEAD_SIZE = 768
"""Largest dimension of query and key heads; value heads may be smaller, not larger."""
FULL_MASK, RIGHT_DOWN_CAUSAL, BAND = 1, 3, 4
"""Values of ``sparse_mode``."""
INVALID_ROWS = 2
"""Value of ``inner_precise``: a row without any visible key gives zeros; by default it would see all keys."""


def make_attention(spec: AttentionSpec) -> AttentionKernel:
    """Return the kernel of one layer.

    For float32 operands with sinks, the kernel of :mod:`anytron.kernels.attention` computes, because the operator's
    backward pass does not support this case (``aclnnFlashAttentionScoreGradV3`` and ``...UnpaddingScoreGradV5`` of CANN
    8.5.0).

    Raises:
        PlatformError: The operator does not support the sizes or the number of heads. When the kernel is called: the
            mask is not bool or does not broadcast to ``[B, H, Sq, Sk]``.
        HookContractError: When the kernel is called: the mask's ``kernel_mode`` is not one that Anytron's default masks
            have.
    """
    if spec.sinks and spec.v_dim != spec.qk_dim:
        raise PlatformError(
            "npu_fusion_attention does not support attention sinks for these head dimensions.",
            where="attention_kernel",
            why=f"query and key heads have dimension {spec.qk_dim}, value heads {spec.v_dim}; with sinks "
            "the two must be equal",
            fix="train a model without attention sinks, or with value heads as large as its query heads",
        )
    if not spec.v_dim <= spec.qk_dim <= MAX_HEAD_SIZE:
        raise PlatformError(
            "npu_fusion_attention does not support these head dimensions.",
            where="attention_kernel",
            why=f"query and key heads have dimension {spec.qk_dim}, value heads {spec.v_dim}; the value "
            f"dimension must not exceed the query dimension, and the query dimension must not exceed {MAX_HEAD_SIZE}",
            fix="train a model with such heads",
        )
    if spec.num_heads > MAX_HEADS or spec.num_heads % spec.num_kv_heads:
        raise PlatformError(
            "npu_fusion_attention does not support this number of heads.",
            where="attention_kernel",
            why=(
                f"this rank has {spec.num_heads} query heads and {spec.num_kv_heads} key/value heads; the number of "
                f"query heads must be a multiple of the number of key/value heads, and at most {MAX_HEADS}"
            ),
            fix="set a parallel.tensor_model_parallel_size that gives each rank such numbers of heads",
        )
    window = spec.traits.window
    neutral = make_neutral(spec)

    def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        if call.sinks is not None and query.dtype is torch.float32:
            return neutral(query, key, value, call)
        causal = is_causal(call, "npu_fusion_attention")
        attend_in_format = _padded if call.format == "bshd" else _packed
        return attend_in_format(query, key, value, call, causal, _sight(causal, window), spec.scale)

    return attend


@dataclass(frozen=True)
class Sight:
    """The number of keys that a query sees before and after its own position; ``UNLIMITED`` = all."""

    before: int
    after: int

    @property
    def everything(self) -> bool:
        """Whether nothing is hidden."""
        return self.before == self.after == UNLIMITED

    @property
    def mode(self) -> int:
        """The ``sparse_mode`` that expresses both numbers with the compressed mask."""
        return RIGHT_DOWN_CAUSAL if (self.before, self.after) == (UNLIMITED, 0) else BAND


def _sight(causal: bool, window: tuple[int, int] | None) -> Sight:
    left, right = window or (-1, -1)
    return Sight(UNLIMITED if left < 0 else left, 0 if causal else UNLIMITED if right < 0 else right)


@functools.cache
def compressed_mask(device: torch.device) -> Tensor:
    """The mask that all compressed modes share: bool ``[2048, 2048]``, True = MASKED above the diagonal."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


def _call_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: str,
    heads: int,
    scale: float,
    call: AttentionCall,
    sight: Sight,
    mask: Tensor | None = None,
    lengths: tuple[list[int], list[int]] | None = None,
) -> Tensor:
    """Attend; ``mask`` (True = MASKED) holds every restriction, without it ``sight`` does."""
    import torch_npu

    query_ends, key_ends = lengths or (None, None)
    if mask is not None:
        mode, before, after = FULL_MASK, UNLIMITED, UNLIMITED
    elif sight.everything:
        mode, before, after = 0, UNLIMITED, UNLIMITED
    else:
        mask, mode, before, after = compressed_mask(query.device), sight.mode, sight.before, sight.after
    output: Tensor = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        heads,
        layout,
        atten_mask=mask,
        scale=scale,
        keep_prob=1.0 - call.dropout,
        pre_tockens=before,
        next_tockens=after,
        inner_precise=INVALID_ROWS if mode == FULL_MASK else 0,
        actual_seq_qlen=query_ends,
        actual_seq_kvlen=key_ends,
        sparse_mode=mode,
        **({} if call.sinks is None else {"sink": call.sinks.float()}),
    )[0]
    return output


def _padded(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, causal: bool, sight: Sight, scale: float
) -> Tensor:
    rows, columns, heads = query.shape[1], key.shape[1], query.shape[2]
    mask = call.mask
    if mask is not None:
        _check_mask(mask, (query.shape[0], heads, rows, columns))
        if not sight.everything:
            window = (sight.before if sight.before < UNLIMITED else -1, sight.after if sight.after < UNLIMITED else -1)
            hidden = forbidden_pairs(rows, columns, causal, window, query.device)
            mask = mask if hidden is None else mask | hidden
        mask = _mask_for_operator(mask, (query.shape[0], heads, rows, columns))
    blind = rows - columns if mask is None and causal else 0
    if blind > 0:  # the first queries stand before the first key
        query = query[:, blind:]
    output = _call_operator(
        query, key, value, layout="BSND", heads=heads, scale=scale, call=call, sight=sight, mask=mask
    )
    return torch.nn.functional.pad(output, (0, 0, 0, 0, blind, 0)) if blind > 0 else output


def _check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Refuse a mask that the operator would read as another one, or as none."""
    fits = mask.dim() <= 4 and all(
        size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if mask.dtype is not torch.bool or not fits:
        raise PlatformError(
            "npu_fusion_attention does not accept this attention mask.",
            where="attention_kernel",
            why=f"its dtype is {mask.dtype} and its shape {tuple(mask.shape)}; it must be bool and broadcastable to "
            f"[B, H, Sq, Sk] = {shape}",
            fix="pass a bool mask of such a shape, in which True means masked",
        )


def _mask_for_operator(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Bring a mask to one of the operator's shapes: ``[B, H, Sq, Sk]``, ``[B, 1, Sq, Sk]`` or ``[1, 1, Sq, Sk]``."""
    full = mask[(None,) * (4 - mask.dim())]
    batch = shape[0] if full.shape[1] > 1 else full.shape[0]
    return full.expand(batch, full.shape[1], *shape[2:]).contiguous()


def _packed(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, causal: bool, sight: Sight, scale: float
) -> Tensor:
    plan = _plan_for(call, causal, query.shape[0], key.shape[0])
    if not plan.query_ends:
        return zeros_from((*query.shape[:-1], value.shape[-1]), query, key, value, call.sinks)
    heads = query.shape[1]
    if plan.columns is not None:
        key, value = key.index_select(0, plan.columns), value.index_select(0, plan.columns)
    chosen = query if plan.rows is None else query.index_select(0, plan.rows)
    lengths = (plan.query_ends, plan.key_ends)
    output = _call_operator(
        chosen, key, value, layout="TND", heads=heads, scale=scale, call=call, sight=sight, lengths=lengths
    )
    if plan.rows is None:
        return output
    return output.new_zeros(query.shape[0], *output.shape[1:]).index_copy(0, plan.rows, output)


class _Plan(NamedTuple):
    """Which rows of a packed buffer attend, and where sequences end among them.

    Attributes:
        rows: int64 rows of the queries that see a key; None = all, in order.
        columns: int64 rows of the real keys of the same sequences; None = all.
        query_ends: Cumulative lengths without a leading 0, as layout TND wants them.
        key_ends: The same for keys.
    """

    rows: Tensor | None
    columns: Tensor | None
    query_ends: list[int]
    key_ends: list[int]


_plans: MicroBatchCache[_Plan] = MicroBatchCache()


def _plan_for(call: AttentionCall, causal: bool, queries: int, keys: int) -> _Plan:
    return _plans.find(call, (causal, queries, keys), lambda: _make_plan(call, causal, queries, keys))


def _make_plan(call: AttentionCall, causal: bool, queries: int, keys: int) -> _Plan:
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_kv is not None
    query_bounds, key_bounds = call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist()
    padded_queries, padded_keys = call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded
    query_starts = query_bounds if padded_queries is None else padded_queries.tolist()
    key_starts = key_bounds if padded_keys is None else padded_keys.tolist()
    rows: list[range] = []
    columns: list[range] = []
    for sequence in range(len(query_bounds) - 1):
        query_length = query_bounds[sequence + 1] - query_bounds[sequence]
        key_length = key_bounds[sequence + 1] - key_bounds[sequence]
        # Causal queries that stand before the first key see nothing.
        blind = max(query_length - key_length, 0) if causal else 0
        if query_length - blind == 0 or key_length == 0:
            continue
        begin = query_starts[sequence]
        rows.append(range(begin + blind, begin + query_length))
        columns.append(range(key_starts[sequence], key_starts[sequence] + key_length))
    device = call.cu_seqlens_q.device
    return _Plan(_rows(rows, queries, device), _rows(columns, keys, device), _ends(rows), _ends(columns))


def _rows(pieces: list[range], total: int, device: torch.device) -> Tensor | None:
    chosen = [row for piece in pieces for row in piece]
    return None if chosen == list(range(total)) else torch.tensor(chosen, dtype=torch.int64, device=device)


def _ends(pieces: list[range]) -> list[int]:
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return ends[1:]
