"""Attention over a sequence that is split between ranks, by gathering keys and values.

Megatron cuts each sequence into ``2 * size`` chunks and gives rank r the chunks r and ``2 * size - 1 - r``, so that
causal work is balanced. Keys and values of all ranks are gathered and put in order. Then each of the rank's two query
chunks sees a prefix of the keys. This is causal attention whose last query is at the last key: an ordinary call of the
attention kernel. (Llama 3 does the same, arXiv:2407.21783, section 3.3.2.)
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anytron.kernels.contract import AttentionCall
from anytron.sequences.planning import inverted, zigzag_order
from anytron_megatron.portable_te.pytorch.collectives import gather_first
from anytron_megatron.portable_te.refusals import refuse

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch.distributed import ProcessGroup

    from anytron.kernels.contract import AttentionKernel


def attend_sharded(
    kernel: AttentionKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    group: ProcessGroup,
    *,
    causal: bool,
    windowed: bool,
) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks.

    ``query``, ``key`` and ``value`` are this rank's, ``[T, H, D]`` (thd) or ``[B, S, H, D]`` (bshd). The lengths in
    ``call`` are for whole sequences; ``call.mask`` must be None. ``causal``: whether a query sees no later keys,
    whatever the platform's kernel mode is called; ``windowed``: whether the kernel has a sliding window.

    Raises:
        EngineError: There is an explicit mask, or a sliding window without causality.
    """
    if call.mask is not None:
        refuse("DotProductAttention", "explicit mask with context parallelism", "use packed sequences")
    if windowed and not causal:
        refuse(
            "DotProductAttention",
            "window without causality with context parallelism",
            "set parallel.context_parallel_size=1",
        )
    split = _padded if call.format == "bshd" else _packed
    return split(kernel, (query, key, value), call, group, causal)


def _padded(
    kernel: AttentionKernel, operands: tuple[Tensor, ...], call: AttentionCall, group: ProcessGroup, causal: bool
) -> Tensor:
    query, *others = operands
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    chunk = query.shape[1] // 2

    def whole(part: Tensor) -> Tensor:
        ranks = gather_first(part.transpose(0, 1), group).unflatten(0, (size, 2, chunk))
        in_order = torch.cat([ranks[:, 0].flatten(0, 1), ranks[:, 1].flip(0).flatten(0, 1)])
        return in_order.transpose(0, 1)

    keys, values = map(whole, others)
    if not causal:
        return kernel(query, keys, values, call)
    outputs = []
    for part, index in zip(query.split(chunk, dim=1), (rank, 2 * size - 1 - rank), strict=True):
        seen = (index + 1) * chunk
        outputs.append(kernel(part, keys[:, :seen], values[:, :seen], call))
    return torch.cat(outputs, dim=1)


def _packed(
    kernel: AttentionKernel, operands: tuple[Tensor, ...], call: AttentionCall, group: ProcessGroup, causal: bool
) -> Tensor:
    query, *others = operands
    plan = _plan_for(call, dist.get_world_size(group), dist.get_rank(group), causal)
    keys, values = (gather_first(part, group).index_select(0, plan.order) for part in others)
    outputs = [
        kernel(
            query,
            keys,
            values,
            dataclasses.replace(own, sinks=call.sinks, dropout=call.dropout, mode_from=call.mode_from),
        )
        for own in plan.calls
    ]
    # Each call leaves the rows of the others zero.
    return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]


class _Plan(NamedTuple):
    """``order``: row of the gathered keys for each position of the whole buffer; ``calls``: one per query chunk."""

    order: Tensor
    calls: tuple[AttentionCall, ...]


# One micro-batch, all layers; see anytron.kernels.packed_sequences, whose plans hang on these calls' tensors.
_plans: MutableMapping[Tensor, tuple[tuple[Any, ...], _Plan]] = WeakTensorKeyDictionary()


def _plan_for(call: AttentionCall, size: int, rank: int, causal: bool) -> _Plan:
    real = call.cu_seqlens_q
    padded = real if call.cu_seqlens_q_padded is None else call.cu_seqlens_q_padded
    assert real is not None
    assert padded is not None
    facts = (size, rank, call.mode, causal, real.is_inference() or real._version, weakref.ref(padded))
    if real in _plans:
        known, plan = _plans[real]
        if known[:-1] == facts[:-1] and known[-1]() is padded:
            return plan
    plan = _make_plan(real, padded, call.mode, causal, size, rank)
    _plans[real] = (facts, plan)
    return plan


def _make_plan(real: Tensor, padded: Tensor, mode: str, causal: bool, size: int, rank: int) -> _Plan:
    lengths, starts = real.long().diff(), padded.long()[:-1]
    widths = padded.long().diff()
    chunk = widths // (2 * size)

    rows = int(padded[-1])
    order = inverted(zigzag_order(widths, size, rows))
    rows_per_rank = rows // size

    def cumulative(counts: Tensor) -> Tensor:
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

    def one_call(queries: Tensor, begins: Tensor, keys: Tensor) -> AttentionCall:
        end = begins.new_full((1,), rows_per_rank)
        return AttentionCall(
            "thd",
            mode,
            cu_seqlens_q=cumulative(queries),
            cu_seqlens_kv=cumulative(keys),
            cu_seqlens_q_padded=torch.cat([begins, end]).to(torch.int32),
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=int(queries.max()),
            max_seqlen_kv=int(keys.max()),
        )

    local = starts // size
    pieces = []
    for half, number in ((0, rank), (1, 2 * size - 1 - rank)):
        queries = torch.minimum((lengths - number * chunk).clamp(min=0), chunk)
        keys = torch.minimum(lengths, (number + 1) * chunk).where(queries > 0, torch.zeros_like(lengths))
        pieces.append((queries, local + half * chunk, keys))
    if not causal:
        # The second chunk has real tokens only if the first one is full: together they are one stretch.
        both = pieces[0][0] + pieces[1][0]
        pieces = [(both, local, lengths.where(both > 0, torch.zeros_like(lengths)))]
    return _Plan(order, tuple(one_call(*piece) for piece in pieces))


def zigzag_positions(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Return each row's position in its sequence, int64 ``[T / size]``, for the rows that a rank holds.

    ``cu_seqlens``, int32 ``[B + 1]``, are the offsets of the whole sequences; T is their total length over all ranks.
    """
    widths = cu_seqlens.long().diff() // size
    sequence = torch.repeat_interleave(widths)
    offset = torch.arange(sequence.numel(), device=cu_seqlens.device) - (cu_seqlens.long()[:-1] // size)[sequence]
    if size == 1:
        return offset
    chunk = (widths // 2)[sequence]
    return torch.where(offset < chunk, offset + rank * chunk, offset - chunk + (2 * size - 1 - rank) * chunk)
