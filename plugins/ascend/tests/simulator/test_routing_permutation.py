"""``npu_moe_token_permute_with_routing_map`` and its inverse: right by their definition, strict about their
documentation.

Legend: N tokens, E experts, K experts of a token, H hidden size.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

H = 3


def routing(count, experts, top_k, seed=0):
    """A map ``[N, E]`` with K ones in every row."""
    scores = torch.rand(count, experts, generator=torch.Generator().manual_seed(seed))
    return torch.zeros(count, experts, dtype=torch.bool).scatter(1, scores.topk(top_k).indices, True)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(routed):
    """What each row of the permuted buffer is: (token, expert)."""
    count, experts = routed.shape
    return [(token, expert) for expert in range(experts) for token in range(count) if routed[token, expert]]


def positions_of(routed):
    rows = rows_of(routed)
    return [rows.index((token, expert)) for token, expert in routed.nonzero().tolist()]


def assert_close(found, wanted):
    torch.testing.assert_close(found.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 5)).flatmap(
    lambda size: st.tuples(st.just(size[0]), st.just(size[1]), st.integers(1, size[1]))
)


def permute(tokens, routed, probs=None, top_k=2, **settings):
    settings = {"num_out_tokens": top_k * len(tokens), **settings}
    return torch_npu.npu_moe_token_permute_with_routing_map(
        tokens.npu(), routed.npu(), probs=None if probs is None else probs.npu(), **settings
    )


@given(SIZES, st.sampled_from([torch.bool, torch.int8]), st.booleans())
def test_permuting_and_its_gradients_by_definition(sizes, map_dtype, with_probs):
    count, experts, top_k = sizes
    routed = routing(*sizes)
    inputs = [random(count, H), random(count, experts, seed=1)][: 1 + with_probs]
    leaves = [tensor.npu().requires_grad_() for tensor in inputs]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    permuted, permuted_probs, positions = permute(leaves[0], routed.to(map_dtype), *leaves[1:], top_k=top_k)
    rows = rows_of(routed)
    wanted = [torch.stack([wide[0][token] for token, _ in rows])]
    if with_probs:
        wanted.append(torch.stack([wide[1][place] for place in rows]))
    found = [permuted, permuted_probs][: len(wanted)]
    assert positions.tolist() == positions_of(routed)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one.detach(), other.detach())
    cotangents = [random(*tensor.shape, seed=2) for tensor in wanted]
    gradients = torch.autograd.grad(found, leaves, [tensor.npu() for tensor in cotangents])
    expected = torch.autograd.grad(wanted, wide, [tensor.double() for tensor in cotangents])
    for gradient, want in zip(gradients, expected, strict=True):
        assert_close(gradient, want)


@given(SIZES, st.booleans())
def test_unpermuting_and_its_gradients_by_definition(sizes, with_probs):
    count, experts, top_k = sizes
    routed = routing(*sizes)
    inputs = [random(count * top_k, H), random(count, experts, seed=1)][: 1 + with_probs]
    leaves = [tensor.npu().requires_grad_() for tensor in inputs]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    positions = torch.tensor(positions_of(routed), dtype=torch.int32).npu()
    given_probs = {"probs": leaves[1], "routing_map": routed.npu()} if with_probs else {}
    found = torch_npu.npu_moe_token_unpermute_with_routing_map(leaves[0], positions, [count, H], **given_probs)
    wanted = torch.zeros(count, H, dtype=torch.float64)
    for row, (token, expert) in enumerate(rows_of(routed)):
        copy = wide[0][row] * wide[1][token, expert] if with_probs else wide[0][row]
        wanted = wanted.index_add(0, torch.tensor([token]), copy[None])
    assert_close(found.detach(), wanted.detach())
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    for gradient, want in zip(gradients, torch.autograd.grad(wanted.square().sum(), wide), strict=True):
        assert_close(gradient, want)


@pytest.mark.parametrize("probs_dtype", [torch.bfloat16, torch.float32])
def test_probabilities_of_bfloat16_tokens_may_be_float32(probs_dtype):
    probs = random(5, 4, dtype=probs_dtype)
    permuted, permuted_probs, _ = permute(random(5, H, dtype=torch.bfloat16), routing(5, 4, 2), probs)
    assert (permuted.dtype, permuted_probs.dtype) == (torch.bfloat16, probs_dtype)


def unpermute(positions=None, probs=None, routed=None, restore_shape=(5, H), **settings):
    positions = torch.tensor(positions_of(routing(5, 4, 2))) if positions is None else positions
    return torch_npu.npu_moe_token_unpermute_with_routing_map(
        random(10, H).npu(),
        positions.int().npu(),
        list(restore_shape),
        probs=None if probs is None else probs.npu(),
        routing_map=None if routed is None else routed.npu(),
        **settings,
    )


UNEVEN = torch.tensor([[1, 1, 0, 0]] * 4 + [[1, 0, 0, 0]]).bool()
VIOLATIONS = {
    "rows of the map that differ": (lambda: permute(random(5, H), UNEVEN), r"= 2 ones, not \[1, 2\]"),
    "as many rows as tokens, by default": (
        lambda: permute(random(5, H), routing(5, 4, 2), num_out_tokens=None),
        r"= 1 ones, not \[2\]",
    ),
    "a map of floats": (lambda: permute(random(5, H), routing(5, 4, 2).float()), "bool or int8"),
    "a map of twos": (lambda: permute(random(5, H), routing(5, 4, 2).to(torch.int8) * 2), "hold only 0 and 1"),
    "a map of other tokens": (lambda: permute(random(5, H), routing(3, 4, 2)), "there are 5 tokens"),
    "probabilities of another dtype": (
        lambda: permute(random(5, H, dtype=torch.float16), routing(5, 4, 2), random(5, 4)),
        "float32 if these are bfloat16",
    ),
    "probabilities of other experts": (
        lambda: permute(random(5, H), routing(5, 4, 2), random(5, 3)),
        r"probs are \(5, 3\)",
    ),
    "permuting with drop_and_pad": (
        lambda: permute(random(5, H), routing(5, 4, 2), num_out_tokens=8, drop_and_pad=True),
        "drop_and_pad is not modelled",
    ),
    "probabilities without a map": (lambda: unpermute(probs=random(5, 4)), "a routing_map is needed"),
    "a position twice": (lambda: unpermute(torch.zeros(10)), "each once"),
    "a slot without an expert": (lambda: unpermute(torch.arange(-1, 9)), "-1 in sorted_indices is not modelled"),
    "another shape to restore": (lambda: unpermute(restore_shape=(4, H)), "not a multiple of 4"),
    "another hidden size to restore": (lambda: unpermute(restore_shape=(5, H + 1)), "rows have 3 numbers"),
    "unpermuting with drop_and_pad": (
        lambda: unpermute(probs=random(5, 4), routed=routing(5, 4, 2), drop_and_pad=True),
        "drop_and_pad is not modelled",
    ),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_what_the_documentation_forbids_is_refused(violation):
    call, text = VIOLATIONS[violation]
    with pytest.raises(RuntimeError, match=text):
        call()
