"""Stand-in of the package ``flash_attn`` (FlashAttention 2).

Source: github.com/Dao-AILab/flash-attention at 0251105a (2.8.4), flash_attn/flash_attn_interface.py line 1391 and
csrc/flash_attn/flash_api.cpp, ``mha_varlen_fwd`` and ``mha_varlen_bwd``.
"""

from __future__ import annotations

from torch.nn.functional import pad

from tests.plugins.cuda.stand_ins.definition import attend, check, check_longest, check_operands

CALLS: list[dict[str, object]] = []
"""Settings of each call."""


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Attend; heads are padded to a multiple of 8 inside."""
    check_operands(q, k, v, cu_seqlens_q, cu_seqlens_k)
    check(q.shape[-1] == v.shape[-1], "v must have shape (total_k, num_heads_k, head_size)")
    check_longest(q, k, cu_seqlens_q, max_seqlen_q)
    check(isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int), "incompatible function arguments")
    assert (softcap, alibi_slopes, return_attn_probs, block_table) == (0.0, None, False, None), "not needed so far"
    CALLS.append({"dropout_p": dropout_p, "deterministic": deterministic, "heads": (q.shape[1], k.shape[1])})
    size = q.shape[-1]
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (pad(operand, (0, -size % 8)) for operand in (q, k, v))
    window = (window_size[0], window_size[1])
    output, _ = attend(
        q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), scale, causal, window, dropout_p
    )
    return output[..., :size]
