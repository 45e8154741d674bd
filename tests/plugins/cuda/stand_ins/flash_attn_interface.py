"""Stand-in of the module ``flash_attn_interface`` (FlashAttention 3) on a Hopper GPU.

Source: github.com/Dao-AILab/flash-attention at 0251105a, hopper/flash_attn_interface.py line 890 and
hopper/flash_api.cpp, ``mha_fwd`` and ``mha_bwd``.
"""

from __future__ import annotations

from tests.plugins.cuda.stand_ins.definition import attend, check, check_operands

RETURNS_LSE = False
"""As before 203b9b3d (August 2025): the log-sum-exp is returned as well."""
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
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attend; heads are multiples of 8, those of values as large as the others but for some sizes."""
    check_operands(q, k, v, cu_seqlens_q, cu_seqlens_k)
    others = (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa)
    assert others == (None,) * 7, "not needed so far"
    assert (attention_chunk, softcap, num_splits, sm_margin, return_attn_probs) == (0, 0.0, 1, 0, False)
    size, v_size = q.shape[-1], v.shape[-1]
    check(size % 8 == 0 and v_size % 8 == 0, "head_size should be a multiple of 8")
    different = (128 < size <= 192 and 96 < v_size <= 128) or (size <= 64 and v_size <= 512)
    check(v_size == size or different, "If V headdim is different from Q/K dim, we only support ...")
    check(not deterministic or max(size, v_size) <= 192, "Deterministic backward not supported for hdim 256.")
    CALLS.append({"deterministic": deterministic, "sizes": (size, v_size)})
    scale = size**-0.5 if softmax_scale is None else softmax_scale
    output, row_sums = attend(
        q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), scale, causal, tuple(window_size)
    )
    return (output, row_sums) if RETURNS_LSE else output
