"""The attention module: formats and mask types against the definition of attention."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytron import hookimpl
from anytron.errors import EngineError, HookContractError
from anytron.masks import AttnMask, MaskKind, Polarity, scope_of
from anytron.plugins import hooks_of
from anytron.reference.attention import reference_attention
from anytron_megatron.portable_te import pytorch as te
from anytron_megatron.portable_te.binding import bind

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS = [5, 3, 7]


def module(**settings):
    return te.DotProductAttention(HEADS, DIM, num_gqa_groups=KV_HEADS, **settings)


def operands(*leading):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*leading, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def cumulative(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def expected(query, key, value, lengths, **settings):
    output = reference_attention(query, key, value, lengths=lengths, scale=DIM**-0.5, **settings)
    return output.float().flatten(-2)


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


LATER = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
NEGATED = AttnMask(MaskKind.FULL_4D, "arbitrary", ~LATER, Polarity.MASKED)


@pytest.mark.parametrize("polarity", Polarity)
def test_the_platforms_mask_stands_in_for_causal_self_attention(bound, polarity):
    query, key, value = operands(1, 4)
    hidden = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1)) > 0.5
    wanted = module()(query, key, value, hidden, qkv_format="bshd", attn_mask_type="arbitrary")
    answer = AttnMask(MaskKind.FULL_4D, "arbitrary", hidden if polarity is Polarity.MASKED else ~hidden, polarity)
    with scope_of(answer)():
        assert torch.equal(module()(query, key, value, qkv_format="bshd"), wanted)
        # As Transformer Engine, the mask type causal reads no tensor: what Megatron passes does not count.
        assert torch.equal(module()(query, key, value, LATER, qkv_format="bshd"), wanted)


@pytest.mark.parametrize(
    ("settings", "call"),
    [
        pytest.param({}, {"attn_mask_type": "no_mask"}, id="both directions, as in a vision tower"),
        pytest.param({"attention_type": "cross"}, {}, id="cross attention"),
        pytest.param({}, {"attn_mask_type": "arbitrary", "attention_mask": LATER}, id="a mask of the layer's own"),
    ],
)
def test_other_layers_are_computed_as_megatron_asks(bound, settings, call):
    inputs = operands(1, 4)
    wanted = module(**settings)(*inputs, qkv_format="bshd", **call)
    with scope_of(NEGATED)():
        assert torch.equal(module(**settings)(*inputs, qkv_format="bshd", **call), wanted)


@pytest.mark.parametrize("mask_type", ["causal", "padding_causal"])
def test_a_kernel_is_told_the_platforms_own_word(mask_type):
    calls = []

    class Chip:
        @hookimpl
        def attention_kernel(self, spec):
            return lambda query, key, value, call: calls.append(call) or query

    undo = bind(hooks_of(extensions={"chip": Chip()}), "cpu")
    ends = cumulative(LENGTHS)
    with scope_of(AttnMask(MaskKind.NONE, "chip_lengths"))():
        module()(*operands(15), qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, attn_mask_type=mask_type)
    undo()
    assert [(call.mode, call.mask) for call in calls] == [("chip_lengths", None)]


def test_a_mode_that_no_kernel_reads_is_refused_by_the_name_of_its_plugin(bound):
    answer = AttnMask(MaskKind.NONE, "chip_lengths", plugin="chip")
    with scope_of(answer)(), pytest.raises(HookContractError, match=r"(?s)'chip_lengths'.*plugin 'chip' answered it"):
        module()(*operands(1, 4), qkv_format="bshd")


def test_the_mask_of_another_micro_batch_is_refused(bound):
    with scope_of(NEGATED)(), pytest.raises(EngineError, match="does not fit this layer"):
        module()(*operands(1, 5), qkv_format="bshd")


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


def test_dropout_draws_in_the_trackers_state_and_only_while_training(bound):
    import contextlib

    forks = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self):
            forks.append(True)
            yield

    attention = module(attention_dropout=0.5, get_rng_state_tracker=Tracker)
    inputs = operands(1, 32)
    first, second = (attention(*inputs, qkv_format="bshd") for _ in range(2))
    assert not torch.equal(first, second)
    assert len(forks) == 2
    attention.eval()
    assert torch.equal(attention(*inputs, qkv_format="bshd"), module()(*inputs, qkv_format="bshd"))
    assert len(forks) == 2


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
        window=window,
        sinks=sinks,
    ).flatten(-2)
    got = attend_flat(attention, inputs[:3], layout, lengths, starts)

    torch.testing.assert_close(got, want)
    cotangent = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    got_grads, want_grads = (torch.autograd.grad(output, inputs, cotangent) for output in (got, want))
    torch.testing.assert_close(got_grads, want_grads)


def attend_flat(attention, inputs, layout, lengths, starts):
    """Attend in a layout; operands and result are rows of all sequences, one after the other."""
    if layout == "thd":
        real, padded = cumulative(lengths), torch.tensor(starts, dtype=torch.int32)
        return attention(
            *inputs,
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
        )
    batch = [operand.unflatten(0, (len(lengths), -1)) for operand in inputs]
    mask = torch.arange(starts[1])[None] >= torch.tensor(lengths)[:, None]
    if layout == "bshd":
        return attention(*batch, mask[:, None, None], qkv_format="bshd").flatten(0, 1)
    sequence_first = attention(*(operand.transpose(0, 1) for operand in batch), mask[:, None, None])
    return sequence_first.transpose(0, 1).flatten(0, 1)


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_dropout_drops_weights_and_scales_the_rest(bound, layout, softmax_type):
    lengths, starts = [7, 9], [0, 9, 18]
    query, key, _ = operands(18)
    value = torch.eye(9).repeat(2, 1)[:, None].expand(-1, KV_HEADS, -1)  # the output is the weights
    whole, dropped = (
        te.DotProductAttention(HEADS, (DIM, 9), KV_HEADS, p, attn_mask_type="padding_causal", softmax_type=softmax_type)
        for p in (0.0, 0.25)
    )
    dropped.load_state_dict(whole.state_dict())
    torch.manual_seed(0)
    weights = attend_flat(whole, (query, key, value), layout, lengths, starts)
    scaled = attend_flat(dropped, (query, key, value), layout, lengths, starts) * 0.75
    kept = scaled != 0
    torch.testing.assert_close(scaled[kept], weights[kept])
    assert 0.65 < kept.sum() / (weights != 0).sum() < 0.85


def test_learnt_sinks_are_parts_of_a_split_tensor_drawn_in_the_trackers_state(bound):
    import contextlib

    forks = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self):
            forks.append(True)
            yield

    attention = module(softmax_type="learnable", tp_size=2, get_rng_state_tracker=Tracker)
    assert attention.softmax_offset.shape == (HEADS // 2,)
    assert attention.softmax_offset.ne(0).all()
    assert forks == [True]
    # Megatron's gradient norm and its distributed checkpoints read these.
    assert attention.softmax_offset.tensor_model_parallel is True
    assert attention.softmax_offset.partition_dim == 0
    assert list(attention.state_dict()) == ["softmax_offset"]
    assert list(module(softmax_type="off-by-one").state_dict()) == []
    assert module().softmax_offset is None


def test_the_kernel_is_told_about_sinks_when_it_is_chosen():
    asked = []

    class Chip:
        @hookimpl
        def attention_kernel(self, spec):
            asked.append(spec.sinks)

    undo = bind(hooks_of(extensions={"chip": Chip()}), "cpu")
    for softmax_type in ("vanilla", "off-by-one", "learnable"):
        module(softmax_type=softmax_type)
    undo()
    assert asked == [False, True, True]


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


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_megatrons_in_every_format(bound, interleaved):
    t = torch.randn(6, 2, HEADS, DIM)
    freqs = torch.randn(10, 1, 1, DIM // 2)
    freqs = freqs.repeat_interleave(2, -1) if interleaved else torch.cat([freqs, freqs], -1)
    rotate = te.attention.apply_rotary_pos_emb
    sequence_first = rotate(t, freqs, interleaved=interleaved)
    batch_first = rotate(t.transpose(0, 1), freqs, tensor_format="bshd", interleaved=interleaved)
    assert torch.equal(sequence_first, batch_first.transpose(0, 1))
    packed = rotate(
        t.transpose(0, 1).flatten(0, 1),
        freqs,
        tensor_format="thd",
        cu_seqlens=torch.tensor([0, 6, 12], dtype=torch.int32),
        interleaved=interleaved,
    )
    assert torch.equal(packed, batch_first.flatten(0, 1))
    # The first position of every sequence turns by the first angle.
    first = rotate(t[:1], freqs[:1], interleaved=interleaved)
    assert torch.equal(sequence_first[:1], first)


def test_rope_positions_of_a_context_parallel_rank_are_zigzag(bound):
    from anytron_megatron.portable_te.pytorch.attention.context_parallel import zigzag_positions

    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert zigzag_positions(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 0, 3]
    assert zigzag_positions(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 1, 2]


def test_split_gives_contiguous_parts_and_joins_gradients():
    x = torch.randn(3, 6, requires_grad=True)
    first, second = te.attention._SplitAlongDim.apply(x, 1, [2, 4])
    assert second.is_contiguous()
    (first.sum() + 2 * second.sum()).backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1, 2, 2, 2, 2]).expand(3, 6))
