"""What the FlashAttention libraries have in common, from the definition, in float64, with their traps.

Rows that no sequence covers are memory that nobody wrote: NaN, in the output and in gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


def check(condition: object, message: str) -> None:
    """As ``TORCH_CHECK`` does."""
    if not condition:
        raise RuntimeError(message)


def check_operands(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """What csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp and torch's copy refuse alike."""
    check(query.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
    check(key.dtype == query.dtype, "query and key must have the same dtype")
    check(value.dtype == query.dtype, "query and value must have the same dtype")
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check(lengths.dtype == torch.int32, f"{name} must have dtype int32")
        check(lengths.is_contiguous(), f"{name} must be contiguous")
        check(lengths.device == query.device, f"{name} must be on CUDA")
        check(lengths.shape == cu_seqlens_q.shape, f"{name} must have shape (batch_size + 1)")
    check(cu_seqlens_q.numel() > 1, "batch size must be positive")
    check(query.dim() == key.dim() == value.dim() == 3, "operands must be [total, heads, head_size]")
    check(query.shape[-1] <= LARGEST_HEAD, "FlashAttention forward only supports head dimension at most 256")
    check(query.shape[1] % key.shape[1] == 0, "Number of heads in key/value must divide number of heads in query")
    check(key.shape[-1] == query.shape[-1], "k must have shape (total_k, num_heads_k, head_size)")
    check(key.shape[:2] == value.shape[:2], "v must have shape (total_k, num_heads_k, head_size)")


def check_longest(query: Tensor, key: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> None:
    """FlashAttention 2 puts grouped heads where queries stand if there is one query per sequence, and reshapes."""
    one_each = max_seqlen_q == 1 and query.shape[1] > key.shape[1]
    check(not one_each or query.shape[0] == cu_seqlens_q.numel() - 1, "shape is invalid for input of this size")


def offset(queries: int, keys: int) -> int:
    """Position of the first query: the last one stands at the last key."""
    return keys - queries


def key_heads(key: Tensor, query_heads: int) -> Tensor:
    """The key head that each query head reads: ``h // (H / G)``."""
    return key.repeat_interleave(query_heads // key.shape[1], 1)


def visible(queries: int, keys: int, causal: bool, window: tuple[int, int], device: torch.device) -> Tensor:
    """Pairs that attend, bool ``[queries, keys]``: window ends are inclusive."""
    left, right = window[0], 0 if causal else window[1]
    distance = (torch.arange(queries) + offset(queries, keys))[:, None] - torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= -distance <= right
    return seen.to(device)


class _Unwritten(torch.autograd.Function):
    """Passes rows on; the gradient of rows that no sequence covers is memory that nobody wrote."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, covered: int) -> Tensor:
        ctx.covered = covered
        return tensor.double()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad[ctx.covered :] = torch.nan
        return grad, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    causal: bool,
    window: tuple[int, int],
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output ``[Tq, H, Dv]`` in the operands' type, and the log-sum-exp float32 ``[H, Tq]``, which has no gradient."""
    ends_q, ends_k = (lengths.tolist() for lengths in cu_seqlens)
    dtype, heads = query.dtype, query.shape[1]
    query = _Unwritten.apply(query, ends_q[-1])
    key, value = _Unwritten.apply(key, ends_k[-1]), _Unwritten.apply(value, ends_k[-1])
    output = query.new_full((query.shape[0], heads, value.shape[-1]), torch.nan)
    row_sums = query.new_full((heads, query.shape[0]), torch.nan)
    pieces = []
    for index in range(len(ends_q) - 1):
        rows, columns = slice(*ends_q[index : index + 2]), slice(*ends_k[index : index + 2])
        queries, keys = rows.stop - rows.start, columns.stop - columns.start
        check(queries <= longest[0] and keys <= longest[1], "a sequence is longer than the longest: rows are left out")
        seen = visible(queries, keys, causal, window, query.device)
        scores = torch.einsum("qhd,khd->hqk", query[rows], key_heads(key[columns], heads)) * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        sums = scores.logsumexp(-1) if keys else scores.new_full(scores.shape[:2], -torch.inf)
        blind = ~seen.any(-1)
        weights = (scores - sums.masked_fill(blind, 0.0)[..., None]).exp()
        if dropout:
            weights = weights * (torch.rand_like(weights) >= dropout) / (1 - dropout)
        pieces.append((rows, torch.einsum("hqk,khd->qhd", weights, key_heads(value[columns], heads))))
        row_sums[:, rows] = sums.masked_fill(blind, torch.inf).detach()
    for rows, piece in pieces:
        output = output.index_copy(0, torch.arange(rows.start, rows.stop), piece)
    return output.to(dtype), row_sums.float()
