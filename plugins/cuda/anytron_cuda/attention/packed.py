"""Attention kernels that call variable-length functions: ``[T, H, D]`` without padding, with ``cu_seqlens``.

FlashAttention 2 and 3 and torch's ``varlen_attn`` are such functions. They do not support padding between sequences:
padding rows are removed from the operands, and are zero in the result. Each row of a padded layout (bshd) is passed as
one sequence; all have the same length.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from anytron.kernels import MicroBatchCache, Rows, is_causal, rearrange, rows_from, zeros_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron.kernels import AttentionCall, AttentionKernel, AttentionSpec

HALF = (torch.float16, torch.bfloat16)
MULTIPLE = 8
"""Heads are padded to a multiple of this size."""


class Sequences(NamedTuple):
    """The arguments of a variable-length function, besides queries, keys and values.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]`` on the device: cumulative numbers of queries of the sequences, with a leading 0.
        cu_seqlens_k: int32 ``[B + 1]`` on the device: the same for keys.
        max_seqlen_q: Largest number of queries of a sequence.
        max_seqlen_k: Largest number of keys of a sequence.
        causal: Whether later keys are hidden from a query; the last query stands at the last key.
        window: Keys to the left and right of its position that a query sees, -1 = all; right is 0 if ``causal``.
        scale: Factor of the scores.
        dropout: Probability of dropping a weight.
        sinks: ``[H]`` logits that join the softmax's denominators; None = there are none.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window: tuple[int, int]
    scale: float
    dropout: float = 0.0
    sinks: Tensor | None = None


def call_obstacle(spec: AttentionSpec, call: AttentionCall, dtype: torch.dtype) -> str | None:
    """Return why functions for packed sequences cannot compute a call of a supported layer; None if they can."""
    del spec
    if dtype not in HALF:
        return f"it computes in float16 and bfloat16, and the operands are {str(dtype).removeprefix('torch.')}"
    if call.mask is not None:
        return f"it does not read masks, and the mode '{call.mode}' has one"
    return None


def make_packed(spec: AttentionSpec, attend: Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]) -> AttentionKernel:
    """Return the kernel of one layer.

    Args:
        spec: The layer.
        attend: Function from queries ``[Tq, H, D]``, keys and values ``[Tk, G, D]`` without padding to ``[Tq, H, Dv]``.
            There is at least one query, and every sequence has queries and keys.
    """
    left, right = spec.traits.window or (-1, -1)

    def kernel(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        causal = is_causal(call, "attention kernel of the CUDA platform")
        shape = query.shape
        if call.format == "bshd":
            layout = _rows_of_one_length(query.shape[0], query.shape[1], key.shape[1], query.device)
            query, key, value = (operand.flatten(0, 1) for operand in (query, key, value))
        else:
            layout = _layout(call, query.shape[0], key.shape[0])
        if layout.max_seqlen_q == 0:
            return zeros_from((*shape[:-1], value.shape[-1]), query, key, value, call.sinks)
        sequences = Sequences(
            layout.cu_seqlens_q,
            layout.cu_seqlens_k,
            layout.max_seqlen_q,
            layout.max_seqlen_k,
            causal,
            (left, 0 if causal else right),
            spec.scale,
            call.dropout,
            call.sinks,
        )
        key, value = layout.keys.take(key), layout.keys.take(value)
        output = layout.queries.put(attend(layout.queries.take(query), key, value, sequences), query.shape[0])
        return output.unflatten(0, shape[:2]) if call.format == "bshd" else output

    return kernel


def padded_heads(query: Tensor, key: Tensor, value: Tensor, *, equal: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with zeros to sizes that the functions support; the caller must cut the output to the values' size.

    This does not change scores, because the caller passes their scale; padding of values gives zeros in the output.

    Args:
        query: ``[..., D]``.
        key: ``[..., D]``.
        value: ``[..., Dv]``.
        equal: Whether queries and values get the same size, the larger one.
    """
    sizes = [-(-operand.shape[-1] // MULTIPLE) * MULTIPLE for operand in (query, value)]
    qk_size, v_size = (max(sizes), max(sizes)) if equal else sizes
    return _pad_to(query, qk_size), _pad_to(key, qk_size), _pad_to(value, v_size)


def _pad_to(operand: Tensor, size: int) -> Tensor:
    missing = size - operand.shape[-1]
    return pad(operand, (0, missing)) if missing else operand


@dataclass(frozen=True)
class _Side:
    """The rows of a buffer that attend, in order.

    Attributes:
        count: Number of rows that attend.
        there: The buffer row of each row that attends; None = they are the first rows of the buffer.
        back: The number of each buffer row among those that attend; rows of padding are empty.
    """

    count: int
    there: Rows | None = None
    back: Rows | None = None

    def take(self, buffer: Tensor) -> Tensor:
        """Return the rows of a buffer that attend."""
        if self.there is not None:
            return rearrange(buffer, self.there, self.back)
        return buffer if buffer.shape[0] == self.count else buffer[: self.count]

    def put(self, rows: Tensor, total: int) -> Tensor:
        """Return a buffer of ``total`` rows with these rows in their places, and zeros elsewhere."""
        if self.there is not None:
            return rearrange(rows, self.back, self.there)
        missing = total - self.count
        return pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


class _Layout(NamedTuple):
    queries: _Side
    keys: _Side
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@functools.lru_cache(maxsize=64)
def _rows_of_one_length(count: int, queries: int, keys: int, device: torch.device) -> _Layout:
    # What is made in inference mode could not be kept for a backward pass.
    with torch.inference_mode(False):
        each = torch.arange(count + 1, dtype=torch.int32, device=device)
        sides = _Side(count * queries), _Side(count * keys)
        return _Layout(*sides, each * queries, each * keys, queries if keys else 0, keys)


_layouts: MicroBatchCache[_Layout] = MicroBatchCache()


def _layout(call: AttentionCall, queries: int, keys: int) -> _Layout:
    return _layouts.find(call, (queries, keys), lambda: _make_layout(call, queries, keys))


@torch.inference_mode(False)
def _make_layout(call: AttentionCall, query_rows: int, key_rows: int) -> _Layout:
    """Copy the lengths to the host, once per micro-batch, and find the rows that attend.

    A sequence without queries or without keys is left out: nothing in it attends, and if the longest sequence has one
    query, FlashAttention 2 assumes one query in each (csrc/flash_attn/flash_api.cpp, ``seqlenq_ngroups_swapped``).
    """
    assert call.cu_seqlens_q is not None
    device = call.cu_seqlens_q.device
    ends_q = _on_host(call.cu_seqlens_q)
    ends_k = ends_q if call.cu_seqlens_kv is None else _on_host(call.cu_seqlens_kv)
    starts_q = (ends_q if call.cu_seqlens_q_padded is None else _on_host(call.cu_seqlens_q_padded))[:-1]
    starts_k = (ends_k if call.cu_seqlens_kv_padded is None else _on_host(call.cu_seqlens_kv_padded))[:-1]
    lengths_q, lengths_k = ends_q.diff(), ends_k.diff()
    attends = (lengths_q > 0) & (lengths_k > 0)
    lengths_q, lengths_k = lengths_q[attends], lengths_k[attends]
    return _Layout(
        _side(starts_q[attends], lengths_q, query_rows, device),
        _side(starts_k[attends], lengths_k, key_rows, device),
        _cumulative(lengths_q, device),
        _cumulative(lengths_k, device),
        int(lengths_q.max()) if lengths_q.numel() else 0,
        int(lengths_k.max()) if lengths_k.numel() else 0,
    )


def _on_host(lengths: Tensor) -> Tensor:
    return lengths.to("cpu", torch.int64)


def _cumulative(lengths: Tensor, device: torch.device) -> Tensor:
    return pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(device)


def _side(starts: Tensor, lengths: Tensor, total: int, device: torch.device) -> _Side:
    before = lengths.cumsum(0) - lengths
    count = int(lengths.sum())
    if torch.equal(starts, before):
        return _Side(count)
    source = torch.repeat_interleave(starts - before, lengths) + torch.arange(count)
    back = torch.full((total,), -1, dtype=torch.int64)
    back[source] = torch.arange(count)
    return _Side(count, rows_from(source, device), rows_from(back, device))
