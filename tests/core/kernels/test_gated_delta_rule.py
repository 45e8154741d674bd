"""The chunked gated delta rule and its convolution against their definitions, and against Hugging Face."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from anytron.kernels import chunks
from anytron.kernels.chunks import CHUNK
from anytron.kernels.fused import causal_conv1d
from anytron.kernels.gated_delta_rule import gated_delta_rule, l2norm
from anytron.kernels.oracles.formulas import reference_causal_conv1d, reference_gated_delta_rule

HEADS, K, V, SCALE = 2, 6, 5, 0.4
BOUNDARIES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1]


def operands(tokens, *, seed=0, dtype=torch.float64, heads=HEADS):
    """Query, key, value, g, beta, flat, as a layer computes them."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = l2norm(randn(tokens, heads, K)), l2norm(randn(tokens, heads, K))
    parts = query, key, randn(tokens, heads, V), logsigmoid(2 * randn(tokens, heads)), randn(tokens, heads).sigmoid()
    return [part.to(dtype).requires_grad_() for part in parts]


def cumulative(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def packed(lengths):
    def run(*flat):
        return gated_delta_rule(*(part[None] for part in flat), SCALE, cumulative(lengths))[0]

    return run


def naive(lengths):
    return lambda *flat: reference_gated_delta_rule(*flat, lengths=lengths, scale=SCALE)


def value_and_grads(function, inputs):
    output = function(*inputs)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return output, torch.autograd.grad(output, inputs, cotangent.to(output.dtype))


def assert_same(got, wanted, inputs):
    for one, other in zip(value_and_grads(got, inputs), value_and_grads(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 20) | st.sampled_from(BOUNDARIES), min_size=1, max_size=5), st.integers(0, 3))
def test_packed_chunks_are_the_recurrence_whatever_the_lengths(lengths, tail):
    """Lengths of 0, of 1 and around a chunk's end; slots after the last sequence give zeros."""
    if sum(lengths):  # without a token nothing has a gradient
        assert_same(packed(lengths), naive(lengths), operands(sum(lengths) + tail, heads=1))


@pytest.mark.parametrize("length", BOUNDARIES)
def test_rows_are_sequences(length):
    inputs = operands(3 * length)

    def rows(*flat):
        return gated_delta_rule(*(part.unflatten(0, (3, length)) for part in flat), SCALE, None).flatten(0, 1)

    assert_same(rows, naive([length] * 3), inputs)


def test_packed_equals_each_sequence_alone():
    lengths = [5, 65, 1, 130, 64]
    inputs = operands(sum(lengths))

    def alone(*flat):
        parts = zip(*(part.split(lengths) for part in flat), strict=True)
        return torch.cat([gated_delta_rule(*(part[None] for part in parts_), SCALE, None)[0] for parts_ in parts])

    assert_same(packed(lengths), alone, inputs)


def test_a_leaking_state_would_be_noticed():
    lengths = [5, 65, 1]
    inputs = operands(sum(lengths))
    got, wanted = packed([sum(lengths)])(*inputs), naive(lengths)(*inputs)
    assert (got - wanted).abs().max() > 1e-2


def test_the_loop_is_as_long_as_the_longest_sequence_not_as_there_are_sequences():
    plan = chunks._plan((40, 130, 7, 130), 320, torch.device("cpu"))
    assert len(plan.steps) == 3
    assert plan.steps[0] == 4
    assert plan.size == 44  # 130 tokens in three equal chunks rather than 64 + 64 + 2


def test_the_layers_of_a_micro_batch_share_a_plan():
    chunks._plan.cache_clear()
    for _ in range(3):
        packed([3, 9])(*operands(12))
    assert chunks._plan.cache_info().misses == 1


def test_strong_decay_and_saturated_updates_stay_finite():
    query, key, value, _, _ = operands(2 * CHUNK, dtype=torch.float32)
    g = torch.full((2 * CHUNK, HEADS), -30.0, requires_grad=True)
    beta = torch.ones(2 * CHUNK, HEADS, requires_grad=True)
    output, grads = value_and_grads(packed([2 * CHUNK]), [query, key, value, g, beta])
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_it_is_hugging_faces(dtype, tolerance):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    length = 150
    inputs = operands(2 * length, dtype=dtype)

    def ours(*flat):
        return gated_delta_rule(*(part.unflatten(0, (2, length)) for part in flat), K**-0.5, None)

    def theirs(query, key, value, g, beta):
        rows = (part.unflatten(0, (2, length)) for part in (query, key, value, g, beta))
        return torch_chunk_gated_delta_rule(*rows)[0]

    for one, other in zip(value_and_grads(ours, inputs), value_and_grads(theirs, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_l2norm_is_hugging_faces_and_zero_has_a_finite_gradient():
    from transformers.models.qwen3_next.modeling_qwen3_next import l2norm as theirs

    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(l2norm(x), theirs(x, dim=-1, eps=1e-6))
    zero = torch.zeros(3, requires_grad=True)
    l2norm(zero).sum().backward()
    assert zero.grad.isfinite().all()


@settings(max_examples=40)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(sum), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_convolution_stays_inside_each_packed_sequence(lengths, width, biased, silu):
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(lengths), 3), (3, width), *([(3,)] if biased else [])]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def got(x, weight, bias=None):
        return causal_conv1d(x[None], weight, bias, silu, cumulative(lengths))[0]

    def wanted(x, weight, bias=None):
        return reference_causal_conv1d(x, weight, bias, lengths=lengths, silu=silu)

    assert_same(got, wanted, inputs)


@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_convolution_of_rows_is_hugging_faces(length, dtype, tolerance):
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in [(2, length, 3), (3, 4)])
    theirs = causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu").transpose(1, 2)
    torch.testing.assert_close(causal_conv1d(x, weight, None, True, None), theirs, rtol=tolerance, atol=tolerance)


def test_a_neighbours_nan_stays_there():
    x = torch.randn(1, 6, 2)
    x[0, 2] = torch.nan
    y = causal_conv1d(x, torch.randn(2, 4), None, True, torch.tensor([0, 3, 6]))
    assert y[0, 3:].isfinite().all()
    inputs = operands(6, dtype=torch.float32)
    with torch.no_grad():
        for part in inputs:
            part[2] = torch.nan
    assert packed([3, 3])(*inputs)[3:].isfinite().all()
