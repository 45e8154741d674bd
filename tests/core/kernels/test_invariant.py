"""Company-invariant kernels compute what the usual ones do, and a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits
from anytron.kernels import fused, invariant
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionSpec, KernelName, KernelSpec, LogProbSpec
from anytron.kernels.log_prob import make_log_prob
from tests.log_prob_oracle import Problem, assert_close

DTYPES = (torch.float32, torch.bfloat16)


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(rows=st.integers(0, 200), width=st.integers(1, 90), entries=st.integers(1, 600), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_product_and_its_gradients_are_those_of_the_definition(rows, width, entries, seed):
    operands = [random(seed + i, *shape).requires_grad_() for i, shape in enumerate([(rows, width), (entries, width)])]
    found = invariant.linear(*operands, random(9, entries))
    upstream = random(seed + 5, rows, entries)
    gradients = torch.autograd.grad(found, operands, upstream)

    exact = [one.detach().double().requires_grad_() for one in operands]
    expected = exact[0] @ exact[1].t() + random(9, entries).double()
    for one, other in zip(
        (found, *gradients), (expected, *torch.autograd.grad(expected, exact, upstream.double())), strict=True
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [63, 576, 1536])
def test_an_entry_depends_on_its_row_and_its_row_of_the_weight_only(width, dtype):
    x, weight = random(0, 300, width, dtype=dtype), random(1, 700, width, dtype=dtype)
    whole = invariant.linear(x, weight, None)
    for rows in (1, 2, 17, 64, 65):
        for begin in (0, 129, 300 - rows):
            part = slice(begin, begin + rows)
            assert torch.equal(invariant.linear(x[part], weight[500:], None), whole[part, 500:])
    splits = [0, 70, 230]
    grouped = invariant.grouped_mm(x, [weight, weight[:700], weight], splits)
    assert torch.equal(grouped, whole)


@given(
    length=st.integers(1, 150),
    heads=st.sampled_from([(4, 4), (6, 2)]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_attention_and_its_gradients_are_those_of_torch(length, heads, masked, seed):
    shapes = (2, heads[0], length, 16), (2, heads[1], length, 16), (2, heads[1], length, 24)
    operands = [random(seed + i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    mask = None
    if masked:
        mask = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(seed)) > 0.5
        mask[..., 0] = True
    settings = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": True, "scale": 0.3}
    upstream = random(seed + 7, 2, heads[0], length, 24)
    found, expected = (attend(*operands, **settings) for attend in (invariant.attention, scaled_dot_product_attention))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found, operands, upstream), torch.autograd.grad(expected, operands, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "size"), [(9, 3, 64), (16, 16, 192)])
def test_a_query_depends_on_the_keys_that_it_sees_only(heads, groups, size, dtype):
    query, key, value = (random(i, 2, n, 200, size, dtype=dtype) for i, n in enumerate((heads, groups, groups)))
    whole = invariant.attention(query, key, value, is_causal=True, enable_gqa=True)
    for length in (1, 2, 63, 64, 65, 130):
        prefix = (query[:1, :, :length], key[:1, :, :length], value[:1, :, :length])
        assert torch.equal(invariant.attention(*prefix, is_causal=True, enable_gqa=True), whole[:1, :, :length])
        last = query[1:, :, length : length + 1]
        seen = key[1:, :, : length + 1], value[1:, :, : length + 1]
        assert torch.equal(invariant.attention(last, *seen, enable_gqa=True), whole[1:, :, length : length + 1])
        later = (torch.arange(200) <= length)[None, None, None]
        masked = invariant.attention(query[:, :, length : length + 1], key, value, attn_mask=later, enable_gqa=True)
        assert torch.equal(masked, whole[:, :, length : length + 1])


def test_attention_has_no_dropout_and_no_sinks():
    operands = [random(i, 1, 2, 3, 8) for i in range(3)]
    with pytest.raises(ValueError, match="no dropout"):
        invariant.attention(*operands, dropout_p=0.1)
    with pytest.raises(HookContractError, match="no sinks"):
        make_attention(AttentionSpec(2, 2, 8, 8, 1.0, ModelTraits(), sinks=True, invariant=True))


@given(
    tokens=st.integers(0, 80),
    entries=st.sampled_from([11, 1100, 9000]),
    chunk=st.integers(1, 16),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_log_probs_entropies_and_gradients_equal_the_definition(tokens, entries, chunk, padding, seed):
    problem = Problem.random(seed, tokens, entries, padding=padding, temperature=0.7)
    # With 9,000 entries torch's own gradient in float32 is 1e-5 of the largest number off.
    assert_close(problem.by_kernel(chunk, invariant=True), problem.by_definition(), tolerance=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entries", [12, 20_000])
def test_a_log_prob_depends_on_its_token_only(entries, dtype):
    hidden, weight = random(0, 400, 96, dtype=dtype), random(1, entries, 96, dtype=dtype)
    labels = torch.randint(0, entries, (400,), generator=torch.Generator().manual_seed(2))

    def computed(part, chunk, padding=0):
        kernel = make_log_prob(LogProbSpec(entries, 1, chunk, dtype=dtype, invariant=True))
        padded = torch.cat([weight, random(3, padding, 96, dtype=dtype)])
        return torch.stack(kernel(hidden[part], padded, labels[part], 0.9, None))

    whole = computed(slice(None), 256)
    for begin, end in ((0, 1), (399, 400), (100, 117), (3, 260)):
        assert torch.equal(computed(slice(begin, end), 3, padding=5), whole[:, begin:end])


def test_the_default_kernels_multiply_in_tiles_only_where_that_is_asked_for():
    spec = KernelSpec("cpu", torch.float32, invariant=True)
    assert fused.default_kernel(KernelName.LINEAR, spec) is invariant.linear
    assert fused.default_kernel(KernelName.GROUPED_MM, spec) is invariant.grouped_mm
    assert fused.default_kernel(KernelName.LINEAR, KernelSpec("cpu")) is fused.linear
    assert fused.default_kernel(KernelName.RMS_NORM, spec) is fused.rms_norm


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("function", "usual"), [(invariant.sigmoid, torch.sigmoid), (invariant.silu, torch.nn.functional.silu)]
)
def test_an_element_has_one_formula_wherever_it_is(function, usual, threads):
    """With threads torch gives each a part, and every part has an end that no vector fills."""
    x, before = random(3, 500, 333).requires_grad_(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = function(x)
        for rows in (1, 7, 64, 301):
            for width in (1, 48, 333):
                assert torch.equal(function(x[-rows:, :width]), whole[-rows:, :width]), (rows, width)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(whole, usual(x))
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(usual(x).sum(), x)[0])


def test_a_mode_gives_torchs_functions_one_formula():
    x = random(4, 9, 5)
    with invariant.OneFormula():
        found = [torch.sigmoid(x), torch.nn.functional.sigmoid(x), x.sigmoid(), torch.nn.functional.silu(x), x.exp()]
    expected = [invariant.sigmoid(x)] * 3 + [invariant.silu(x), x.exp()]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with invariant.OneFormula(), pytest.raises(TypeError):
        torch.sigmoid(x, out=x.clone())
