"""Stand-in of torch's FlashAttention operators on the CPU, below the ``varlen_attn`` that is installed.

``torch.library`` holds them to the operators' schemas. Source: torch 2.13, torch/nn/attention/varlen.py, and
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_varlen_fwd`` and ``mha_varlen_bwd``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tests.plugins.cuda.stand_ins import definition
from tests.plugins.cuda.stand_ins.definition import attend, check, check_longest, check_operands

if TYPE_CHECKING:
    from collections.abc import Iterator


def _check(query, key, value, cu_seqlens_q, cu_seqlens_k, max_q):
    check_operands(query, key, value, cu_seqlens_q, cu_seqlens_k)
    check(query.shape[-1] == value.shape[-1], "v must have shape (total_k, num_heads_k, head_size)")
    check(query.shape[-1] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    check_longest(query, key, cu_seqlens_q, max_q)
    for operand in (query, key, value):
        check(operand.stride(-1) == 1, "Input tensor must have contiguous last dimension")


def forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """``aten::_flash_attention_forward`` with cumulative lengths."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q)
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert (seqused_k, alibi_slopes, block_table, num_splits) == (None,) * 4
    window = tuple(-1 if end is None else end for end in (window_size_left, window_size_right))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output, row_sums = attend(query, key, value, (cum_seq_q, cum_seq_k), (max_q, max_k), scale, is_causal, window)
    nothing = torch.empty(0)
    return output, row_sums, torch.zeros(2, dtype=torch.uint64), nothing, nothing.clone()


def backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    """``aten::_flash_attention_backward``: weights from the log-sum-exp, and sums of rows from the output."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q)
    check(out.dtype == query.dtype and grad_out.dtype == query.dtype, "query and out must have the same dtype")
    check(logsumexp.dtype == torch.float32, "expected scalar type Float")
    check(logsumexp.shape == (query.shape[1], query.shape[0]), "softmax_lse must have shape (num_heads, total_q)")
    assert (dropout_p, rng_state.dtype, unused.numel()) == (0.0, torch.uint64, 0)
    window = tuple(-1 if end is None else end for end in (window_size_left, window_size_right))
    grads = [torch.full_like(operand, torch.nan, dtype=torch.float64) for operand in (query, key, value)]
    ends_q, ends_k = cum_seq_q.tolist(), cum_seq_k.tolist()
    heads, groups = query.shape[1], key.shape[1]
    for index in range(len(ends_q) - 1):
        rows, columns = slice(*ends_q[index : index + 2]), slice(*ends_k[index : index + 2])
        q, do, o = (operand[rows].double() for operand in (query, grad_out, out))
        k, v = (definition.key_heads(operand[columns].double(), heads) for operand in (key, value))
        seen = definition.visible(q.shape[0], k.shape[0], is_causal, window, q.device)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = (scores - logsumexp[:, rows].double()[..., None]).exp().masked_fill(~seen, 0.0)
        grad_weights = torch.einsum("qhd,khd->hqk", do, v)
        grad_scores = weights * (grad_weights - (do * o).sum(-1).t()[..., None]) * scale
        grads[0][rows] = torch.einsum("hqk,khd->qhd", grad_scores, k)
        grad_k, grad_v = torch.einsum("hqk,qhd->khd", grad_scores, q), torch.einsum("hqk,qhd->khd", weights, do)
        for gradient, per_head in zip(grads[1:], (grad_k, grad_v), strict=True):
            gradient[columns] = per_head.unflatten(1, (groups, heads // groups)).sum(2)
    return tuple(gradient.to(query.dtype) for gradient in grads)


@contextmanager
def installed() -> Iterator[None]:
    """Let the operators exist on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()
