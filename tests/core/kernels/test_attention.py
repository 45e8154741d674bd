"""Attention against its definition: outputs and gradients, packed and padded, whatever the lengths."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits
from anytron.kernels import packed_sequences
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.kernels.oracles.attention import reference_attention

DIM, V_DIM, SCALE = 8, 6, 0.3
PACKED = {True: "padding_causal", False: "padding"}
PADDED = {True: "causal", False: "no_mask"}


def kernel(heads=4, kv_heads=2, *, causal=True, window=None, dropout=0.0, sinks=False):
    traits = ModelTraits(causal=causal, window=window)
    return make_attention(AttentionSpec(heads, kv_heads, DIM, V_DIM, SCALE, traits, dropout, sinks))


def operands(query_rows, key_rows=None, heads=4, kv_heads=2, *, seed=0, v_dim=V_DIM, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    key_rows = query_rows if key_rows is None else key_rows
    shapes = ((query_rows, heads, DIM), (key_rows, kv_heads, DIM), (key_rows, kv_heads, v_dim))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def cumulative(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def value_and_grads(attend, inputs):
    output = attend(*inputs)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return output, torch.autograd.grad(output, inputs, cotangent.to(output.dtype))


def assert_same(attend, reference, inputs):
    got, got_grads = value_and_grads(attend, inputs)
    want, want_grads = value_and_grads(reference, inputs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_grads, want_grads)


lengths_and_gaps = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=7).filter(
    lambda pairs: sum(length for length, _ in pairs)
)
windows = st.none() | st.tuples(st.integers(-1, 12), st.integers(-1, 12))


@settings(max_examples=60, deadline=None)
@given(lengths_and_gaps, st.integers(0, 3), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.booleans(), windows)
def test_packed_attention_is_the_definition_whatever_lengths_padding_heads_and_window(
    sequences, tail, heads, causal, window
):
    lengths = [length for length, _ in sequences]
    padded = [length + gap for length, gap in sequences]
    starts = list(accumulate(padded, initial=0))[:-1]
    inputs = operands(sum(padded) + tail, None, *heads)
    call = AttentionCall(
        "thd",
        PACKED[causal],
        cu_seqlens_q=cumulative(lengths),
        cu_seqlens_kv=cumulative(lengths),
        cu_seqlens_q_padded=cumulative(padded),
        cu_seqlens_kv_padded=cumulative(padded),
    )
    attend = kernel(*heads, causal=causal, window=window)
    assert_same(
        lambda q, k, v: attend(q, k, v, call),
        lambda q, k, v: reference_attention(
            q, k, v, lengths=lengths, starts=starts, key_starts=starts, scale=SCALE, causal=causal, window=window
        ),
        inputs,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=5).filter(
        lambda pairs: sum(q for q, _ in pairs) and sum(k for _, k in pairs)
    ),
    st.booleans(),
    windows,
)
def test_with_other_keys_than_queries_the_last_query_stands_at_the_last_key(sequences, causal, window):
    lengths, key_lengths = [q for q, _ in sequences], [k for _, k in sequences]
    inputs = operands(sum(lengths), sum(key_lengths))
    call = AttentionCall("thd", PACKED[causal], cu_seqlens_q=cumulative(lengths), cu_seqlens_kv=cumulative(key_lengths))
    attend = kernel(causal=causal, window=window)
    assert_same(
        lambda q, k, v: attend(q, k, v, call),
        lambda q, k, v: reference_attention(
            q, k, v, lengths=lengths, key_lengths=key_lengths, scale=SCALE, causal=causal, window=window
        ),
        inputs,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(0, 6), st.booleans(), windows, st.booleans())
def test_padded_attention_is_the_definition(batch, rows, surplus, causal, window, with_sinks):
    columns = rows + surplus
    flat = operands(batch * rows, batch * columns)
    sinks = [torch.linspace(-2, 2, 4, dtype=torch.float64).requires_grad_()] if with_sinks else []
    attend = kernel(causal=causal, window=window, sinks=with_sinks)

    def padded(q, k, v, *s):
        call = AttentionCall("bshd", PADDED[causal], sinks=s[0] if s else None)
        q, k, v = q.view(batch, rows, 4, DIM), k.view(batch, columns, 2, DIM), v.view(batch, columns, 2, V_DIM)
        return attend(q, k, v, call).flatten(0, 1)

    def reference(q, k, v, *s):
        lengths, key_lengths = [rows] * batch, [columns] * batch
        return reference_attention(
            *(q, k, v),
            lengths=lengths,
            key_lengths=key_lengths,
            scale=SCALE,
            causal=causal,
            window=window,
            sinks=s[0] if s else None,
        )

    assert_same(padded, reference, [*flat, *sinks])


def test_sinks_take_part_in_packed_attention_and_learn():
    lengths = [3, 9, 1]
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    inputs = [*operands(sum(lengths)), sinks]
    attend = kernel(sinks=True)

    def packed(q, k, v, s):
        return attend(q, k, v, AttentionCall("thd", "padding_causal", cu_seqlens_q=cumulative(lengths), sinks=s))

    def reference(q, k, v, s):
        return reference_attention(q, k, v, lengths=lengths, scale=SCALE, sinks=s)

    assert_same(packed, reference, inputs)


def test_an_explicit_mask_hides_what_is_true_and_joins_causality():
    lengths = [3, 5]
    inputs = operands(10)
    padding = torch.arange(5)[None] >= torch.tensor(lengths)[:, None]
    call = AttentionCall("bshd", "padding_causal", mask=padding[:, None, None] | padding[:, None, :, None])
    attend = kernel()
    assert_same(
        lambda q, k, v: attend(*(x.view(2, 5, *x.shape[1:]) for x in (q, k, v)), call).flatten(0, 1),
        lambda q, k, v: reference_attention(q, k, v, lengths=lengths, starts=[0, 5], key_starts=[0, 5], scale=SCALE),
        inputs,
    )


def test_rows_without_keys_give_zeros_and_no_gradient():
    query, key, value = (x.view(1, 4, *x.shape[1:]) for x in operands(4))
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 2, :] = True
    for sinks in (None, torch.zeros(4, dtype=torch.float64)):
        call = AttentionCall("bshd", "arbitrary", mask=mask, sinks=sinks)
        output = kernel(causal=False)(query, key, value, call)
        assert output[0, 2].eq(0).all()
        (grad,) = torch.autograd.grad(output.sum(), query)
        assert grad.isfinite().all()
        assert grad[0, 2].eq(0).all()


def test_garbage_in_padding_reaches_neither_outputs_nor_gradients():
    lengths, padded = [3, 40, 2], [5, 41, 8]
    inputs = operands(sum(padded))
    real = torch.cat([torch.arange(p) < n for n, p in zip(lengths, padded, strict=True)])
    with torch.no_grad():
        for operand in inputs:
            operand[~real] = torch.nan
    cu, cu_padded = cumulative(lengths), cumulative(padded)
    call = AttentionCall(
        "thd", "padding_causal", cu_seqlens_q=cu, cu_seqlens_q_padded=cu_padded, cu_seqlens_kv_padded=cu_padded
    )
    output, grads = value_and_grads(lambda q, k, v: kernel()(q, k, v, call), inputs)
    assert output[~real].eq(0).all()
    assert output.isfinite().all()
    for grad in grads:
        assert grad.isfinite().all()
        assert grad[~real].eq(0).all()


def test_dropout_drops_and_keeps_the_expectation():
    torch.manual_seed(0)
    query, key, value = operands(64, v_dim=V_DIM)
    cu = cumulative([64])
    exact = kernel()(query, key, value, AttentionCall("thd", "padding_causal", cu_seqlens_q=cu))
    call = AttentionCall("thd", "padding_causal", cu_seqlens_q=cu, dropout=0.5)
    draws = torch.stack([kernel(dropout=0.5)(query, key, value, call).detach() for _ in range(400)])
    assert not torch.allclose(draws[0], draws[1])
    torch.testing.assert_close(draws.mean(0), exact.detach(), atol=0.35, rtol=0)


def count_dense_calls(monkeypatch):
    from anytron.kernels import attention

    shapes = []
    original = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention, "scaled_dot_product_attention", lambda q, *a, **k: (shapes.append(q.shape), original(q, *a, **k))[1]
    )
    return shapes


def test_equal_lengths_are_a_view_and_one_call(monkeypatch):
    shapes = count_dense_calls(monkeypatch)

    def refuse(*arguments):
        raise AssertionError("rows were gathered")

    monkeypatch.setattr(packed_sequences, "rearrange", refuse)
    query, key, value = operands(32 * 9, dtype=torch.float32)
    kernel()(query, key, value, AttentionCall("thd", "padding_causal", cu_seqlens_q=cumulative([9] * 32)))
    assert shapes == [(32, 4, 9, DIM)]


def test_hundreds_of_ragged_sequences_take_few_calls_and_little_padding(monkeypatch):
    shapes = count_dense_calls(monkeypatch)
    lengths = torch.randint(4, 65, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    query, key, value = operands(sum(lengths), dtype=torch.float32)
    kernel()(query, key, value, AttentionCall("thd", "padding_causal", cu_seqlens_q=cumulative(lengths)))
    assert len(shapes) <= 20
    assert sum(shape[0] * shape[2] ** 2 for shape in shapes) < 1.5 * sum(length**2 for length in lengths)


def test_layers_share_the_plan_of_a_micro_batch_and_a_change_in_place_is_noticed():
    cu = cumulative([3, 20, 45])
    call = AttentionCall("thd", "padding_causal", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    plan = packed_sequences.plan_for(call, 68, 68)
    assert packed_sequences.plan_for(dataclasses.replace(call, mode="padding"), 68, 68) is plan
    assert packed_sequences.plan_for(dataclasses.replace(call, cu_seqlens_kv=cu.clone()), 68, 68) is not plan
    cu[1] = 4
    changed = packed_sequences.plan_for(call, 68, 68)
    assert sorted(length for group in changed.groups for length in group.query_lengths.tolist()) == [4, 19, 45]


def test_plans_die_with_their_micro_batch():
    before = len(packed_sequences._plans)
    cu = cumulative([3, 20])
    packed_sequences.plan_for(AttentionCall("thd", "padding_causal", cu_seqlens_q=cu), 23, 23)
    assert len(packed_sequences._plans) == before + 1
    del cu
    assert len(packed_sequences._plans) == before


@pytest.mark.parametrize("lengths", [[4, 4], [4, 19, 47]])
def test_inference_mode_tensors_are_accepted(lengths):
    with torch.inference_mode():
        query, key, value = operands(sum(lengths), dtype=torch.float32)
        call = AttentionCall("thd", "padding_causal", cu_seqlens_q=cumulative(lengths))
        output = kernel()(query, key, value, call)
    want = reference_attention(query, key, value, lengths=lengths, scale=SCALE)
    torch.testing.assert_close(output.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (AttentionCall("bshd", "chip_causal"), "does not support the kernel mode 'chip_causal'"),
        (AttentionCall("bshd", "chip_causal", mode_from="chip"), "build_attn_mask of plugin 'chip' returned this mode"),
        (AttentionCall("thd", "causal"), "does not support the kernel mode 'causal'"),
        (AttentionCall("bshd", "arbitrary"), "does not match its mask"),
        (AttentionCall("bshd", "causal", mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool)), "does not match its mask"),
    ],
)
def test_a_mode_that_this_kernel_does_not_read_is_refused_with_a_remedy(call, message):
    query, key, value = (x.view(1, 4, *x.shape[1:]) for x in operands(4))
    with pytest.raises(HookContractError, match=message) as refusal:
        kernel()(query, key, value, call)
    assert refusal.value.fix
