"""The attention module: formats and mask types against the definition of attention."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytron.base.errors import EngineError
from anytron.kernels.oracles.attention import reference_attention
from anytron_megatron.portable_te import pytorch as te
from tests.backends.megatron.portable_te.attention_cases import (
    DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    attend_flat,
    cumulative,
    expected,
    module,
    operands,
)


def test_packed_sequences_with_gaps(bound):
    starts = [0, 6, 10]
    query, key, value = operands(20)
    padded = torch.tensor([*starts, 20], dtype=torch.int32)
    output = module()(
        *(query, key, value),
        qkv_format="thd",
        cu_seqlens_q=cumulative(LENGTHS),
        cu_seqlens_kv=cumulative(LENGTHS),
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=7,
        max_seqlen_kv=7,
        attn_mask_type="padding_causal",
    )
    torch.testing.assert_close(output, expected(query, key, value, LENGTHS, starts=starts, key_starts=starts))


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
@pytest.mark.parametrize("window", [None, (2, 0), (-1, -1)])
def test_sbhd_and_bshd_agree_with_the_definition(bound, mask_type, window):
    batch, length = 3, 6
    query, key, value = operands(batch, length)
    flat = [operand.flatten(0, 1) for operand in (query, key, value)]
    wanted = expected(*flat, [length] * batch, causal=mask_type == "causal", window=window)
    attention = module(attn_mask_type=mask_type, window_size=window)
    padded = attention(query, key, value, qkv_format="bshd")
    torch.testing.assert_close(padded.flatten(0, 1), wanted)
    sequence_first = attention(*(operand.transpose(0, 1) for operand in (query, key, value)))
    assert sequence_first.shape == (length, batch, HEADS * DIM)
    torch.testing.assert_close(sequence_first.transpose(0, 1), padded)


def test_a_padding_mask_hides_keys_and_makes_padded_rows_zero(bound):
    query, key, value = operands(3, 7)
    mask = torch.arange(7)[None] >= torch.tensor(LENGTHS)[:, None]
    output = module()(
        query, key, value, mask[:, None, None], qkv_format="bshd", attn_mask_type="padding_causal"
    ).flatten(0, 1)
    flat = [operand.flatten(0, 1) for operand in (query, key, value)]
    starts = [0, 7, 14]
    torch.testing.assert_close(output, expected(*flat, LENGTHS, starts=starts, key_starts=starts))


def test_an_arbitrary_mask_says_everything(bound):
    query, key, value = operands(1, 4)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
    output = module()(query, key, value, mask, qkv_format="bshd", attn_mask_type="arbitrary")[0]
    torch.testing.assert_close(output, expected(query[0], key[0], value[0], [4]))


def test_a_mask_does_not_count_where_the_mask_type_says_none(bound):
    # As Transformer Engine: Megatron passes masks along with attn_mask_type causal.
    query, key, value = operands(1, 4)
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    output = module()(query, key, value, everything, qkv_format="bshd", attn_mask_type="causal")[0]
    torch.testing.assert_close(output, expected(query[0], key[0], value[0], [4]))


def test_the_last_query_stands_at_the_last_key_where_asked_for(bound):
    (query, _, _), (_, key, value) = operands(2), operands(6)
    output = module()(query[None], key[None], value[None], qkv_format="bshd", attn_mask_type="causal_bottom_right")
    torch.testing.assert_close(output[0], expected(query, key, value, [2], key_lengths=[6]))


def test_value_heads_may_have_another_size(bound):
    query, key, _ = operands(6)
    value = torch.randn(6, KV_HEADS, 5)
    attention = te.DotProductAttention(HEADS, (DIM, 5), num_gqa_groups=KV_HEADS, softmax_scale=0.5)
    output = attention(query[None], key[None], value[None], qkv_format="bshd")
    wanted = reference_attention(query, key, value, lengths=[6], scale=0.5).float().flatten(-2)
    torch.testing.assert_close(output[0], wanted)


sequences = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=5)


windows = st.none() | st.tuples(st.integers(-1, 5), st.integers(-1, 5))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences,
    st.sampled_from(["thd", "bshd", "sbhd"]),
    st.booleans(),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    windows,
    st.sampled_from(["vanilla", "off-by-one", "learnable"]),
)
def test_outputs_and_gradients_are_the_definitions_for_every_trait_in_every_layout(
    bound, lengths_and_gaps, layout, causal, heads, window, softmax_type
):
    lengths = [length for length, _ in lengths_and_gaps]
    widths = [length + gap for length, gap in lengths_and_gaps]
    if layout != "thd":
        widths = [max(widths)] * len(widths)
    starts = [0, *accumulate(widths)]
    query_heads, kv_heads = heads
    attention = te.DotProductAttention(
        query_heads,
        (DIM, 5),
        num_gqa_groups=kv_heads,
        attn_mask_type="padding_causal" if causal else "padding",
        window_size=window,
        softmax_type=softmax_type,
    ).double()
    generator = torch.Generator().manual_seed(0)
    shapes = [(starts[-1], query_heads, DIM), (starts[-1], kv_heads, DIM), (starts[-1], kv_heads, 5)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    sinks = attention.softmax_offset
    if softmax_type == "learnable":
        inputs.append(sinks)
        torch.nn.init.normal_(sinks, generator=generator)

    want = reference_attention(
        *inputs[:3],
        lengths=lengths,
        starts=starts[:-1],
        key_starts=starts[:-1],
        scale=DIM**-0.5,
        causal=causal,
        window=None if not causal and window == (-1, 0) else window,  # as Transformer Engine corrects it
        sinks=sinks,
    ).flatten(-2)
    got = attend_flat(attention, inputs[:3], layout, lengths, starts)

    torch.testing.assert_close(got, want)
    cotangent = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    got_grads, want_grads = (torch.autograd.grad(output, inputs, cotangent) for output in (got, want))
    torch.testing.assert_close(got_grads, want_grads)


@pytest.mark.parametrize(
    ("mask_type", "given", "window_size"),
    [
        ("causal", None, (-1, 0)),
        ("causal", (-1, -1), (-1, 0)),
        ("padding_causal", (3, 2), (3, 0)),
        ("no_mask", None, (-1, -1)),
        ("padding", (-1, 0), (-1, -1)),
        ("padding", (0, 2), (0, 2)),
    ],
)
def test_a_window_is_what_transformer_engine_makes_of_it(bound, mask_type, given, window_size):
    # transformer_engine/pytorch/attention/dot_product_attention/utils.py, check_set_window_size
    attention = module(attn_mask_type=mask_type, window_size=given)
    assert attention.window_size == window_size
    nothing_padded = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    attention(*operands(2, 4), nothing_padded, qkv_format="bshd", window_size=given)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attn_mask_type": "odd"}, "mask type 'odd'"),
        ({"qkv_format": "t3hd"}, "qkv_format t3hd"),
        ({"window_size": (3, 0)}, "window_size=(3, 0)"),
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type='alibi'"),
        ({"num_splits": 4}, "num_splits=4"),
        ({"attn_mask_type": "padding"}, "needs a mask"),
        ({"qkv_format": "thd", "attn_mask_type": "arbitrary"}, "mask type arbitrary for packed sequences"),
    ],
)
def test_calls_that_are_not_computed_are_refused(bound, settings, named):
    with pytest.raises(EngineError) as error:
        module()(*operands(1, 4), **{"qkv_format": "bshd", **settings})
    assert named in str(error.value)


def test_causality_without_an_alignment_is_refused(bound):
    (query, _, _), (_, key, value) = operands(1, 2), operands(1, 6)
    with pytest.raises(EngineError, match="2 queries and 6 keys"):
        module()(query, key, value, qkv_format="bshd")


def test_settings_that_are_not_computed_are_refused(bound):
    with pytest.raises(EngineError, match="softmax_type 'odd'"):
        module(softmax_type="odd")
    with pytest.raises(EngineError, match="return_max_logit=True"):
        module(return_max_logit=True)
    with pytest.raises(EngineError, match="hierarchical"):
        module(cp_group=[None, None])
