"""Context-parallel attention of sequences with fewer tokens than ranks, all ranks in turn: none leaves the graph."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.traits import ModelTraits
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionSpec
from anytron.kernels.oracles.attention import reference_attention
from anytron_megatron.portable_te.pytorch.attention.context_parallel import _make_plan

HEADS, GROUPS, SIZE, SCALE = 2, 1, 4, 0.4


@given(size=st.integers(2, 5), lengths=st.lists(st.integers(1, 11), min_size=1, max_size=4), causal=st.booleans())
def test_every_rank_depends_on_queries_keys_and_values_and_all_together_attend(size, lengths, causal):
    widths = [-(-length // (2 * size)) * 2 * size for length in lengths]
    real, padded = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (lengths, widths))
    generator = torch.Generator().manual_seed(0)
    rows = sum(widths)
    query = torch.randn(rows, HEADS, SIZE, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(rows, GROUPS, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    attend = make_attention(AttentionSpec(HEADS, GROUPS, SIZE, SIZE, SCALE, ModelTraits(causal=causal)))
    mode = "padding_causal" if causal else "padding"

    outputs = []
    for rank in range(size):
        plan = _make_plan(real, padded, mode, causal, size, rank)
        own = torch.empty_like(query).index_copy_(0, plan.order, query).chunk(size)[rank]
        leaves = [one.clone().requires_grad_() for one in (own, key, value)]
        for call in plan.calls:
            output = attend(*leaves, call)
            gradients = torch.autograd.grad(output.sum(), leaves)  # raises if one is not in the graph
            assert [one.shape for one in gradients] == [one.shape for one in leaves]
        outputs.append(sum(attend(*leaves, call) for call in plan.calls).detach())

    whole = torch.cat(outputs).index_select(0, plan.order)
    right = reference_attention(
        *(query, key, value), lengths=lengths, starts=padded[:-1].tolist(), key_starts=padded[:-1].tolist(),
        scale=SCALE, causal=causal,
    )  # fmt: skip
    torch.testing.assert_close(whole, right)
