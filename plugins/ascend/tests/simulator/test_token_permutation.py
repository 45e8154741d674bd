"""``npu_moe_token_permute`` and ``npu_moe_token_unpermute``: right by their definition, strict about their
documentation.

op-plugin's real C++ and torch_npu's autograd run in front of the reference kernels. Legend: N tokens, K experts of
a token, H hidden size.
"""

from __future__ import annotations

import pytest
import torch
import torch_npu
from anytron_ascend_simulator import aclnn
from hypothesis import given
from hypothesis import strategies as st

N, K, H = 5, 2, 3
EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])


def naive_permute(tokens, experts, kept=None):
    """One copy after the other, by expert, then by token; where each copy lies."""
    flat, top_k = experts.flatten().tolist(), experts[0].numel()
    copies = sorted(range(len(flat)), key=lambda copy: (flat[copy], copy))
    positions = [copies.index(copy) for copy in range(len(flat))]
    return torch.stack([tokens[copy // top_k] for copy in copies[:kept]]), positions


def naive_unpermute(permuted, positions, probs):
    tokens, top_k = probs.shape
    return torch.stack(
        [sum(probs[n, k] * permuted[positions[n * top_k + k]] for k in range(top_k)) for n in range(tokens)]
    )


def tokens_like(rows, dtype=torch.float32, seed=0):
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found, wanted):
    torch.testing.assert_close(found.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


@given(
    experts=st.integers(1, 4).flatmap(
        lambda top_k: st.lists(st.lists(st.integers(0, 5), min_size=top_k, max_size=top_k), min_size=1, max_size=8)
    ),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    kept=st.none() | st.integers(1, 40),
)
def test_permuting_sorts_the_copies_by_expert_and_sums_their_gradients(experts, index_dtype, kept):
    experts = torch.tensor(experts, dtype=index_dtype)
    tokens = tokens_like(len(experts))
    leaf, wide = tokens.npu().requires_grad_(), tokens.double().requires_grad_()
    permuted, positions = torch_npu.npu_moe_token_permute(leaf, experts.npu(), kept)
    wanted, wanted_positions = naive_permute(wide, experts, kept)
    assert_close(permuted.detach(), wanted.detach())
    assert positions.dtype == torch.int32
    assert positions.tolist() == wanted_positions
    cotangent = tokens_like(len(permuted), seed=1)
    (found,) = torch.autograd.grad(permuted, leaf, cotangent.npu())
    assert_close(found, torch.autograd.grad(wanted, wide, cotangent.double())[0])


@given(st.integers(1, 6), st.integers(1, 4))
def test_unpermuting_weighs_and_sums_and_so_do_its_gradients(count, top_k):
    generator = torch.Generator().manual_seed(count)
    positions = torch.randperm(count * top_k, generator=generator)
    inputs = [tokens_like(count * top_k), torch.rand(count, top_k, generator=generator)]
    leaves = [tensor.npu().requires_grad_() for tensor in inputs]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    found = torch_npu.npu_moe_token_unpermute(leaves[0], positions.int().npu(), leaves[1])
    wanted = naive_unpermute(wide[0], positions.tolist(), wide[1])
    assert_close(found.detach(), wanted.detach())
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    for gradient, want in zip(gradients, torch.autograd.grad(wanted.square().sum(), wide), strict=True):
        assert_close(gradient, want)


def test_without_probabilities_copies_come_back_and_are_not_summed():
    permuted, positions = torch_npu.npu_moe_token_permute(tokens_like(N).npu(), EXPERTS.npu())
    leaf = permuted.detach().requires_grad_()
    back = torch_npu.npu_moe_token_unpermute(leaf, positions)
    assert torch.equal(back.detach().cpu(), tokens_like(N).repeat_interleave(K, 0))
    cotangent = tokens_like(N * K, seed=1).npu()
    (gradient,) = torch.autograd.grad(back, leaf, cotangent)
    assert torch.equal(gradient[positions.long()], cotangent)


def test_the_examples_of_the_documentation_belong_together():
    """The later examples of both operators (torch_npu/_op_plugin_docs.py): the second is fed what the first gives."""
    tokens = torch.tensor([[1, 1], [2, 2], [3, 3], [4, 4]], dtype=torch.float16).npu()
    experts = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 0]]).npu()
    permuted, positions = torch_npu.npu_moe_token_permute(tokens, experts)
    assert permuted[:, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert positions.tolist() == [0, 4, 5, 1, 2, 6, 7, 3]
    probs = torch.ones((4, 2), dtype=torch.float16).npu() / 2
    assert torch.equal(torch_npu.npu_moe_token_unpermute(permuted, positions, probs), tokens)


def test_unpermuting_undoes_permuting():
    tokens = tokens_like(N)
    permuted, positions = torch_npu.npu_moe_token_permute(tokens.npu(), EXPERTS.npu())
    halves = torch.full((N, K), 0.5).npu()
    assert_close(torch_npu.npu_moe_token_unpermute(permuted, positions, halves), tokens.double())


def test_sorted_indices_are_positions_and_not_megatrons_argsort():
    """Megatron's ``sorted_indices`` say which copy a row holds; read so, copies come back to the wrong tokens."""
    permuted, positions = torch_npu.npu_moe_token_permute(tokens_like(N).npu(), EXPERTS.npu())
    argsort = torch.argsort(EXPERTS.flatten(), stable=True)
    assert positions.tolist() != argsort.tolist()
    assert torch.equal(permuted[positions.long()].cpu(), tokens_like(N).repeat_interleave(K, 0))
    assert not torch.equal(permuted.cpu()[argsort], tokens_like(N).repeat_interleave(K, 0))


@pytest.mark.parametrize(("asked", "rows"), [(None, 10), (0, 10), (4, 4), (99, 10), (-3, 7)])
def test_num_out_tokens_is_a_slice_of_the_sorted_copies(asked, rows):
    permuted, positions = torch_npu.npu_moe_token_permute(tokens_like(N).npu(), EXPERTS.npu(), asked)
    wanted, _ = naive_permute(tokens_like(N), EXPERTS)
    assert torch.equal(permuted.cpu(), wanted[:rows])
    assert positions.numel() == N * K, "dropped copies keep their positions"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_have_the_dtype_of_the_tokens(dtype):
    permuted, positions = torch_npu.npu_moe_token_permute(tokens_like(N, dtype).npu(), EXPERTS.npu())
    probs = torch.full((N, K), 0.5).npu()  # float32, as a router's are
    back = torch_npu.npu_moe_token_unpermute(permuted, positions, probs)
    assert permuted.dtype == back.dtype == dtype
    assert torch.equal(back.cpu(), tokens_like(N, dtype)), "halves of equal numbers add up exactly"


def permute(tokens=None, experts=EXPERTS, **settings):
    return torch_npu.npu_moe_token_permute(
        (tokens_like(N) if tokens is None else tokens).npu(), experts.npu(), **settings
    )


def unpermute(positions=None, probs=None, permuted=None, **settings):
    permuted = tokens_like(N * K) if permuted is None else permuted
    positions = torch.arange(N * K, dtype=torch.int32) if positions is None else positions
    return torch_npu.npu_moe_token_unpermute(
        permuted.npu(), positions.npu(), None if probs is None else probs.npu(), **settings
    )


VIOLATIONS = {
    "tokens of three dimensions": (lambda: permute(torch.ones(N, 1, H)), "should be 2 dimensional"),
    "tokens that are integers": (lambda: permute(torch.ones(N, H, dtype=torch.int32)), "float16, bfloat16 or float32"),
    "experts that are floats": (lambda: permute(experts=EXPERTS.float()), "int32 or int64"),
    "experts of other tokens": (lambda: permute(experts=EXPERTS[:3]), "do not match 5 tokens"),
    "a negative expert": (lambda: permute(experts=EXPERTS - 1), "at least 0"),
    "an expert beyond float32": (lambda: permute(experts=EXPERTS + 2**24), "less than 16777215"),
    "too many experts of a token": (
        lambda: permute(experts=torch.zeros(N, 513, dtype=torch.int64)),
        "513 experts of a token",
    ),
    "permuting in padded mode": (lambda: permute(padded_mode=True), "padded_mode is not supported"),
    "more rows cut off than there are": (lambda: permute(num_out_tokens=-11), "negative|num_out_tokens"),
    "positions of int64": (lambda: unpermute(torch.arange(N * K)), "int64, not int32"),
    "a position twice": (lambda: unpermute(torch.zeros(N * K, dtype=torch.int32)), "each once"),
    "a position beyond the end": (lambda: unpermute(torch.arange(1, N * K + 1, dtype=torch.int32)), "each once"),
    "positions of dropped copies": (lambda: unpermute(permuted=tokens_like(7)), "none may have been dropped"),
    "probabilities of other tokens": (lambda: unpermute(probs=torch.ones(3, K)), r"probs are \(3, 2\), but .* 10"),
    "probabilities that are integers": (lambda: unpermute(probs=torch.ones(N, K, dtype=torch.int64)), "probs are"),
    "probabilities of one dimension": (lambda: unpermute(probs=torch.ones(N * K)), "should be 2 dimensional"),
    "unpermuting in padded mode": (lambda: unpermute(padded_mode=True), "padded_mode is not supported"),
    "a shape to restore": (lambda: unpermute(restore_shape=[N, H]), "only None is supported"),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_what_the_documentation_forbids_is_refused(violation):
    call, text = VIOLATIONS[violation]
    with pytest.raises(RuntimeError, match=text):
        call()


def test_a_gradient_of_more_rows_than_copies_is_refused():
    positions = torch.arange(N * K, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match="the gradient has 11 rows"):
        torch_npu.npu_moe_token_permute_grad_v2(tokens_like(N * K + 1).npu(), positions, N, torch.float32, K)


def test_the_operators_are_the_simulators():
    names = [f"aclnnMoeToken{name}" for name in ("Permute", "PermuteGrad", "Unpermute", "UnpermuteGrad")]
    before = [aclnn.CALLS[name] for name in names]
    leaf = tokens_like(N).npu().requires_grad_()
    permuted, positions = torch_npu.npu_moe_token_permute(leaf, EXPERTS.npu())
    torch_npu.npu_moe_token_unpermute(permuted, positions, torch.ones(N, K).npu()).sum().backward()
    assert [aclnn.CALLS[name] for name in names] == [count + 1 for count in before]
