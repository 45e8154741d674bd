"""Sorting tokens by expert: Megatron's own functions give the same rows, sums and gradients (moe_permute_fusion)."""

import pytest
import torch

from anytron.base.errors import EngineError
from anytron_megatron.portable_te.pytorch import permutation

TOKENS, EXPERTS, HIDDEN = 7, 4, 3


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    routing = torch.rand(TOKENS, EXPERTS, generator=generator) < 0.5
    routing[2] = False  # a token without experts
    routing[:, 1] = False  # an expert without tokens
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    probs = torch.rand(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)
    return tokens.requires_grad_(), probs.requires_grad_(), routing


def by_hand(routing):
    """The (expert, token) of each row."""
    return [(expert, token) for expert in range(EXPERTS) for token in range(TOKENS) if routing[token, expert]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int32], ids=str)
def test_rows_are_sorted_by_expert(case, kind):
    tokens, probs, routing = case
    rows = by_hand(routing)
    permuted, selected, row_id_map = permutation.moe_permute_with_probs(tokens, probs, routing.to(kind), len(rows))
    assert torch.equal(permuted, torch.stack([tokens[token] for _, token in rows]))
    assert torch.equal(selected, torch.stack([probs[token, expert] for expert, token in rows]))
    alone, same = permutation.moe_permute(tokens, routing.to(kind))
    assert torch.equal(alone, permuted)
    assert torch.equal(same, row_id_map)


def test_rows_of_a_token_are_added_with_their_weights(case):
    tokens, probs, routing = case
    permuted, _, row_id_map = permutation.moe_permute_with_probs(tokens, probs, routing)
    restored = permutation.moe_unpermute(permuted, row_id_map, probs, tokens.shape)
    weights = (probs * routing).sum(dim=1, keepdim=True)
    torch.testing.assert_close(restored, tokens * weights)
    assert torch.equal(
        permutation.moe_unpermute(permuted, row_id_map, probs=probs, restore_shape=tokens.shape), restored
    )
    wanted = torch.autograd.grad((tokens * weights).square().sum(), (tokens, probs))
    found = torch.autograd.grad(restored.square().sum(), (tokens, probs))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_low_precision_is_added_in_float32():
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    weights = torch.tensor([[1 + 1 / 256, 1.0]])
    row_id_map = torch.tensor([[0, 1], [0, 0]])
    total = permutation.moe_unpermute(rows, row_id_map, weights, torch.Size([1, 1]))
    assert total.item() == 258.0  # in bfloat16, 256 * (1 + 1/256) is 256
    assert total.dtype is torch.bfloat16


def test_without_tokens_there_are_no_rows():
    permuted, row_id_map = permutation.moe_permute(torch.empty(0, HIDDEN), torch.empty(0, EXPERTS, dtype=torch.bool))
    assert permuted.shape == (0, HIDDEN)
    assert permutation.moe_unpermute(permuted, row_id_map, restore_shape=torch.Size([0, HIDDEN])).shape == (0, HIDDEN)


def test_chunks_change_places_with_their_probs():
    rows = torch.arange(12.0).reshape(6, 2)
    sizes, order = torch.tensor([1, 3, 0, 2]), torch.tensor([3, 0, 2, 1])
    sorted_rows, probs = permutation.moe_sort_chunks_by_index_with_probs(rows, torch.arange(6.0), sizes, order)
    assert probs.tolist() == [4, 5, 0, 1, 2, 3]
    assert torch.equal(sorted_rows, rows[probs.long()])


def test_what_cannot_be_is_refused(case):
    tokens, _, routing = case
    with pytest.raises(EngineError, match="num_out_tokens is 3, and routing_map has"):
        permutation.moe_permute(tokens, routing, 3)
    with pytest.raises(EngineError, match="There are 7 tokens, and routing_map is for 6"):
        permutation.moe_permute(tokens, routing[:6])
    with pytest.raises(EngineError, match="Both merging_probs and probs are given"):
        permutation.moe_unpermute(tokens, torch.zeros(2, TOKENS, dtype=torch.long), routing, probs=routing)
    with pytest.raises(EngineError, match="map_type='index'"):
        permutation.moe_permute(tokens, routing, map_type="index")
    with pytest.raises(EngineError, match="map_type='index'"):
        permutation.moe_unpermute(tokens, torch.zeros(2, TOKENS, dtype=torch.long), map_type="index")
    with pytest.raises(EngineError, match="support for pad_offsets="):
        permutation.moe_unpermute(tokens, torch.zeros(2, TOKENS, dtype=torch.long), pad_offsets=routing[0])


def test_a_layer_of_experts_is_the_same_fused(run_program):
    assert run_program("fused_permutation.py", ranks=2).splitlines() == [
        "alltoall : equal",
        "allgather : equal",
        "alltoall moe_expert_capacity_factor: equal",
        "alltoall moe_expert_capacity_factor moe_pad_expert_input_to_capacity: equal",
    ]
