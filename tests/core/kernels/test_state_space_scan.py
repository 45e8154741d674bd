"""The chunked state space scan of Mamba-2 against its definition, and against Hugging Face."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import softplus

from anytron.kernels import chunks
from anytron.kernels.chunks import CHUNK
from anytron.kernels.oracles.formulas import reference_state_space_scan
from anytron.kernels.state_space_scan import state_space_scan

HEADS, GROUPS, P, N = 4, 2, 3, 5
BOUNDARIES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1]


def operands(tokens, *, seed=0, dtype=torch.float64, heads=HEADS, groups=GROUPS):
    """x, dt, a, b, c, d, flat, as a layer computes them."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rates, keys = -(randn(heads).exp()), (randn(tokens, groups, N) for _ in range(2))
    parts = randn(tokens, heads, P), softplus(randn(tokens, heads)), rates, *keys, randn(heads)
    return [part.to(dtype).requires_grad_() for part in parts]


def cumulative(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def batched(x, dt, a, b, c, d, shape, cu_seqlens):
    x, dt, b, c = (part.unflatten(0, shape) for part in (x, dt, b, c))
    return state_space_scan(x, dt, a, b, c, d, cu_seqlens).flatten(0, 1)


def packed(lengths):
    return lambda *flat: batched(*flat, (1, len(flat[0])), cumulative(lengths))


def naive(lengths):
    return lambda *flat: reference_state_space_scan(*flat, lengths=lengths)


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
        assert_same(packed(lengths), naive(lengths), operands(sum(lengths) + tail, heads=2, groups=1))


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("groups", [1, GROUPS, HEADS])
def test_rows_are_sequences(length, groups):
    inputs = operands(3 * length, groups=groups)
    assert_same(lambda *flat: batched(*flat, (3, length), None), naive([length] * 3), inputs)


def test_a_leaking_state_would_be_noticed():
    lengths = [5, 65, 1]
    inputs = operands(sum(lengths))
    got, wanted = packed([sum(lengths)])(*inputs), naive(lengths)(*inputs)
    assert (got - wanted).abs().max() > 1e-2


def test_layers_of_either_kind_share_the_plan_of_a_micro_batch():
    chunks._plan.cache_clear()
    for _ in range(3):
        packed([3, 9])(*operands(12))
    assert chunks._plan.cache_info().misses == 1


def test_strong_decay_stays_finite():
    x, _, _, b, c, d = operands(2 * CHUNK, dtype=torch.float32)
    dt = torch.full((2 * CHUNK, HEADS), 30.0, requires_grad=True)
    a = torch.full((HEADS,), -16.0, requires_grad=True)
    output, grads = value_and_grads(packed([2 * CHUNK]), [x, dt, a, b, c, d])
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


def test_a_neighbours_nan_stays_there():
    inputs = operands(6, dtype=torch.float32)
    x, dt, _, b, c, _ = inputs
    with torch.no_grad():
        for part in (x, dt, b, c):
            part[2] = torch.nan
    assert packed([3, 3])(*inputs)[3:].isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_is_hugging_faces(dtype, tolerance):
    """Its chunks have 16 tokens here; whatever the type of the operands, it computes in float32."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    length = 150
    inputs = operands(2 * length, dtype=dtype)

    def theirs(x, dt, a, b, c, d):
        x, dt, b, c = (part.unflatten(0, (2, length)) for part in (x, dt, b, c))
        return mamba2_chunk_scan(x, dt, a, b, c, chunk_size=16, D=d).flatten(0, 1)

    (got, ours), (wanted, expected) = (
        value_and_grads(function, inputs) for function in (lambda *flat: batched(*flat, (2, length), None), theirs)
    )
    for one, other in zip((got, *ours), (wanted, *expected), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=tolerance, atol=tolerance * other.abs().max().item())
