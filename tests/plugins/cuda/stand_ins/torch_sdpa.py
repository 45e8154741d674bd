"""Torch's ``scaled_dot_product_attention`` on the CPU, which refuses what its fused kernels refuse on a GPU.

Source: torch 2.13, aten/src/ATen/native/transformers/sdp_utils_cpp.h: ``check_nonzero_sequence_lengths_dense``,
``check_last_dim_stride_equals_1_dense``, ``check_batch_size_and_num_heads_dense``.
"""

from __future__ import annotations

from torch.nn.functional import scaled_dot_product_attention as compute

from tests.plugins.cuda.stand_ins.definition import check

REFUSAL = "No available kernel. Aborting execution."


def scaled_dot_product_attention(query, key, value, attn_mask=None, *, enable_gqa=False, **settings):
    check(0 not in (query.shape[-2], key.shape[-2]), REFUSAL)
    check(all(one.stride(-1) == 1 for one in (query, key, value)), REFUSAL)
    check(attn_mask is None or attn_mask.stride(-1) == 1, REFUSAL)
    check(key.shape[1] == value.shape[1], REFUSAL)
    check(enable_gqa or query.shape[1] == key.shape[1], REFUSAL)
    return compute(query, key, value, attn_mask, enable_gqa=enable_gqa, **settings)
