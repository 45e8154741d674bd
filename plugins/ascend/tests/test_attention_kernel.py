"""The attention kernel on ``npu_fusion_attention``, against the definition in float64, for every layout and trait."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
from anytron_ascend_simulator import aclnn
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anytron.base.errors import PlatformError
from anytron.base.traits import ModelTraits
from anytron.kernels.attention import make_attention as make_neutral
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.kernels.oracles.attention import reference_attention
from anytron_ascend.kernels.attention import compressed_mask, make_attention

D, SCALE = 8, 0.3
PACKED = {True: "padding_causal", False: "padding"}
PADDED = {True: "causal", False: "no_mask"}
WINDOWS = st.none() | st.tuples(st.integers(-1, 12), st.integers(-1, 12))


def spec(causal=True, window=None, value_size=D, heads=4, kv_heads=2):
    return AttentionSpec(
        heads, kv_heads, D, value_size, SCALE, ModelTraits(causal=causal, window=window), device_type="npu"
    )


def operands(queries, keys, value_size=D, heads=4, kv_heads=2, leading=()):
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, heads, D), (keys, kv_heads, D), (keys, kv_heads, value_size))
    return [torch.randn(*leading, *shape, generator=generator) for shape in shapes]


def cumulative(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).npu()


def assert_same(attend, reference, inputs):
    leaves = [tensor.npu().requires_grad_() for tensor in inputs]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    found, wanted = attend(*leaves), reference(*wide)
    torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), atol=3e-6, rtol=1e-5)
    for gradient, want in zip(
        torch.autograd.grad(found.square().sum(), leaves),
        torch.autograd.grad(wanted.square().sum(), wide),
        strict=True,
    ):
        torch.testing.assert_close(gradient.cpu().double(), want, atol=3e-5, rtol=1e-4)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=5).filter(
        lambda pairs: sum(length for length, _ in pairs)
    ),
    st.sampled_from([D, 5]),
    st.booleans(),
    WINDOWS,
)
def test_packed_sequences(sequences, value_size, causal, window):
    lengths = [length for length, _ in sequences]
    starts = list(accumulate((length + gap for length, gap in sequences), initial=0))
    padded = torch.tensor(starts, dtype=torch.int32).npu()
    call = AttentionCall("thd", PACKED[causal], cumulative(lengths), cumulative(lengths), padded, padded, 20, 20)
    kernel = make_attention(spec(causal, window, value_size))
    assert_same(
        lambda q, k, v: kernel(q, k, v, call),
        lambda q, k, v: reference_attention(
            q,
            k,
            v,
            lengths=lengths,
            scale=SCALE,
            causal=causal,
            window=window,
            starts=starts[:-1],
            key_starts=starts[:-1],
        ),
        operands(starts[-1], starts[-1], value_size),
    )


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), st.booleans())
@example(sequences=[(0, 1), (1, 0)], causal=True)  # no query has a key
def test_queries_and_keys_of_different_numbers(sequences, causal):
    # Context parallelism asks for this: a chunk of queries, and all keys before its end.
    queries, keys = (list(side) for side in zip(*sequences, strict=True))
    if not sum(queries) or not sum(keys):
        return
    call = AttentionCall("thd", PACKED[causal], cumulative(queries), cumulative(keys), None, None, 9, 9)
    kernel = make_attention(spec(causal))
    assert_same(
        lambda q, k, v: kernel(q, k, v, call),
        lambda q, k, v: reference_attention(q, k, v, lengths=queries, key_lengths=keys, scale=SCALE, causal=causal),
        operands(sum(queries), sum(keys)),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (2, -1), (2, 1)])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (3, 7)])
def test_rows(causal, window, masked, rows, columns):
    mask, mode = None, PADDED[causal]
    if masked:
        mode = PACKED[causal]
        mask = torch.rand(2, 1, rows, columns, generator=torch.Generator().manual_seed(1)) > 0.5
        mask[0, 0, 1] = True  # a row that sees nothing
    neutral = make_neutral(dataclasses.replace(spec(causal, window), device_type="cpu"))
    kernel = make_attention(spec(causal, window))
    assert_same(
        lambda q, k, v: kernel(q, k, v, AttentionCall("bshd", mode, mask=None if mask is None else mask.npu())),
        lambda q, k, v: neutral(q, k, v, AttentionCall("bshd", mode, mask=mask)),
        operands(rows, columns, leading=(2,)),
    )


def test_the_compressed_mask_is_made_once():
    assert compressed_mask(torch.device("npu", 0)) is compressed_mask(torch.device("npu", 0))


def test_it_is_the_fused_operator():
    before = aclnn.CALLS["aclnnFlashAttentionVarLenScore"]
    call = AttentionCall("thd", "padding_causal", cumulative([3]), cumulative([3]), None, None, 3, 3)
    make_attention(spec())(*(tensor.npu() for tensor in operands(3, 3)), call)
    assert aclnn.CALLS["aclnnFlashAttentionVarLenScore"] == before + 1


def test_heads_that_the_operator_does_not_have_are_refused():
    with pytest.raises(PlatformError, match="does not support these head dimensions"):
        make_attention(spec(value_size=2 * D))
