"""Every kernel against the definition in float64, values and gradients, over stand-ins that compute as documented."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anytron.kernels.contract import AttentionCall
from tests.plugins.cuda.attention.cases import (
    LAYERS,
    PACKED,
    PADDED,
    assert_computes,
    assert_computes_masks,
    assert_computes_strided_rows,
    assert_same,
    cumulative,
    defined,
    operands,
    spec,
)
from tests.plugins.cuda.stand_ins import definition, flash_attn, flash_attn_interface

pytestmark = pytest.mark.usefixtures("stand_ins")
LIBRARIES = ("flash_attention_3", "flash_attention_2", "varlen")
KERNELS = (*LIBRARIES, "sdpa")
WINDOWS = st.none() | st.tuples(st.integers(-1, 12), st.integers(-1, 12))
SIZES = st.sampled_from([(16, 16), (16, 8), (12, 5), (8, 24)])
HEADS = st.sampled_from([(4, 4), (4, 2), (6, 1)])


def make(name, layer):
    from anytron_cuda.attention.choice import CANDIDATES

    return CANDIDATES[name].make(layer)


def packed_call(layer, queries, keys, padded_queries=None, padded_keys=None, **others):
    return AttentionCall(
        "thd",
        PACKED[layer.traits.causal],
        cumulative(queries),
        cumulative(keys),
        padded_queries,
        padded_keys,
        max(queries),
        max(keys),
        **others,
    )


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=5).filter(
        lambda pairs: sum(length for length, _ in pairs)
    ),
    SIZES,
    HEADS,
    st.booleans(),
    WINDOWS,
)
def test_packed_sequences(name, sequences, sizes, heads, causal, window):
    layer = spec(causal, window, *sizes, *heads)
    lengths = [length for length, _ in sequences]
    starts = list(accumulate((length + gap for length, gap in sequences), initial=0))
    padded = torch.tensor(starts, dtype=torch.int32)
    call = packed_call(layer, lengths, lengths, padded, padded)
    kernel = make(name, layer)
    assert_same(
        lambda q, k, v: kernel(q, k, v, call),
        defined(layer, lengths, starts=starts[:-1], key_starts=starts[:-1]),
        operands(starts[-1], starts[-1], layer),
    )


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4).filter(
        lambda pairs: all(map(sum, zip(*pairs, strict=True)))
    ),
    st.booleans(),
    WINDOWS,
)
@example(pairs=[(0, 1), (1, 0)], causal=True, window=None)  # no query has a key
@example(pairs=[(1, 5), (0, 3)], causal=True, window=None)  # a longest sequence of one query, and one without
@example(pairs=[(6, 2)], causal=True, window=None)  # the first queries stand before the first key
def test_queries_and_keys_of_different_numbers(name, pairs, causal, window):
    # Context parallelism asks for this: a chunk of queries, and all keys before its end.
    layer = spec(causal, window)
    queries, keys = (list(side) for side in zip(*pairs, strict=True))
    kernel, call = make(name, layer), packed_call(layer, queries, keys)
    assert_same(
        lambda q, k, v: kernel(q, k, v, call),
        defined(layer, queries, key_lengths=keys),
        operands(sum(queries) + 2, sum(keys) + 1, layer),
    )


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4), SIZES, st.booleans(), WINDOWS)
@example(pairs=[(6, 2)], sizes=(16, 16), causal=True, window=None)  # the first queries give all to the sink
def test_sinks(pairs, sizes, causal, window):
    layer = spec(causal, window, *sizes, sinks=True)
    queries, keys = (list(side) for side in zip(*pairs, strict=True))
    kernel, call = make("varlen", layer), packed_call(layer, queries, keys)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0])
    assert_same(
        lambda q, k, v, s: kernel(q, k, v, dataclasses.replace(call, sinks=s)),
        defined(layer, queries, key_lengths=keys),
        [*operands(sum(queries), sum(keys), layer), sinks],
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (3, 7)])
def test_rows(name, causal, window, rows, columns):
    layer = spec(causal, window)
    kernel, call = make(name, layer), AttentionCall("bshd", PADDED[causal])

    def reference(*inputs):
        packed = [one.flatten(0, 1) for one in inputs]
        return defined(layer, [rows] * 2, key_lengths=[columns] * 2)(*packed).unflatten(0, (2, rows))

    inputs = operands(rows, columns, layer, leading=(2,))
    assert_same(lambda q, k, v: kernel(q, k, v, call), reference, inputs)
    # As Megatron has them: sequence before batch.
    turned = [one.transpose(0, 1).contiguous() for one in inputs]
    assert_same(
        lambda *rest: kernel(*(one.transpose(0, 1) for one in rest), call),
        lambda *rest: reference(*(one.transpose(0, 1) for one in rest)),
        turned,
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_are_the_fused_operators(heads, causal):
    from anytron.kernels.attention import make_attention

    layer = spec(causal, None, 16, 8, *heads)
    mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[0, 0, 1] = True  # a row that sees nothing
    call = AttentionCall("bshd", PACKED[causal], mask=mask)
    fused, neutral = make("sdpa", layer), make_attention(layer)
    inputs = operands(7, 7, layer, leading=(2,))
    assert_same(lambda q, k, v: fused(q, k, v, call), lambda q, k, v: neutral(q, k, v, call), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_rows_and_no_query_are_the_fused_operators_too(dtype):
    assert_computes_strided_rows(make("sdpa", layer := spec()), layer, "cpu", dtype)


def test_values_of_latent_attention_stay_smaller_where_the_library_takes_them():
    layer = spec(True, None, 192, 128)
    kernel, call = make("flash_attention_3", layer), packed_call(layer, [5, 3], [5, 3])
    assert_same(lambda q, k, v: kernel(q, k, v, call), defined(layer, [5, 3]), operands(8, 8, layer))
    assert flash_attn_interface.CALLS[-1]["sizes"] == (192, 128)


def test_an_older_flash_attention_3_returns_the_log_sum_exp_as_well(monkeypatch):
    monkeypatch.setattr(flash_attn_interface, "RETURNS_LSE", True)
    layer = spec()
    kernel, call = make("flash_attention_3", layer), packed_call(layer, [5, 3], [5, 3])
    assert_same(lambda q, k, v: kernel(q, k, v, call), defined(layer, [5, 3]), operands(8, 8, layer))


def test_dropout_drops_while_it_is_in_force_and_draws_from_the_current_generator():
    layer = spec(dropout=0.5)
    kernel, call = make("flash_attention_2", layer), packed_call(layer, [30], [30])
    inputs = operands(30, 30, layer)
    dropping = dataclasses.replace(call, dropout=0.5)
    torch.manual_seed(3)
    first = kernel(*inputs, dropping)
    assert flash_attn.CALLS[-1]["dropout_p"] == 0.5
    assert not torch.equal(kernel(*inputs, dropping), first)
    torch.manual_seed(3)
    assert torch.equal(kernel(*inputs, dropping), first)
    assert_same(lambda q, k, v: kernel(q, k, v, call), defined(layer, [30]), inputs)


@pytest.mark.parametrize(
    ("name", "library"), [("flash_attention_2", flash_attn), ("flash_attention_3", flash_attn_interface)]
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_runs_ask_for_the_deterministic_backward_pass(name, library, deterministic, monkeypatch):
    layer = spec()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    make(name, layer)(*operands(5, 5, layer), packed_call(layer, [5], [5]))
    assert library.CALLS[-1]["deterministic"] is deterministic


def test_grouped_heads_are_not_repeated():
    layer = spec(heads=6, kv_heads=2)
    make("flash_attention_2", layer)(*operands(5, 5, layer), packed_call(layer, [5], [5]))
    assert flash_attn.CALLS[-1]["heads"] == (6, 2)


def test_a_micro_batch_of_generation_does_not_spoil_the_next_one_of_training():
    layer = spec()
    kernel, call = make("varlen", layer), AttentionCall("bshd", "causal")
    inputs = operands(11, 11, layer, leading=(2,))
    with torch.inference_mode():
        kernel(*inputs, call)
    kernel(*(one.requires_grad_() for one in inputs), call).sum().backward()


# ---- what these tests, and those on a GPU, would notice ----------------------------------------------


def sequences_of_two_lengths(name, layer):
    kernel, call = make(name, layer), packed_call(layer, [3, 6], [7, 6])
    assert_same(
        lambda q, k, v: kernel(q, k, v, call), defined(layer, [3, 6], key_lengths=[7, 6]), operands(9, 13, layer)
    )


SABOTAGE = {
    "aligned to the first key": ("offset", lambda queries, keys: 0),
    "heads in turn": ("key_heads", lambda key, heads: key.repeat(1, heads // key.shape[1], 1)),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_a_library_that_computes_something_else_is_noticed(name, sabotage, monkeypatch):
    sequences_of_two_lengths(name, spec())
    monkeypatch.setattr(definition, *SABOTAGE[sabotage])
    with pytest.raises(AssertionError, match="not close"):
        sequences_of_two_lengths(name, spec())


@pytest.mark.parametrize("name", LIBRARIES)
def test_windows_whose_ends_are_not_inclusive_are_noticed(name, monkeypatch):
    layer = spec(window=(2, 0))
    sequences_of_two_lengths(name, layer)
    original = definition.visible
    monkeypatch.setattr(
        definition, "visible", lambda q, k, causal, window, device: original(q, k, causal, (window[0] - 1, 0), device)
    )
    with pytest.raises(AssertionError, match="not close"):
        sequences_of_two_lengths(name, layer)


@pytest.mark.parametrize("name", LIBRARIES)
def test_lengths_of_another_type_are_refused(name, monkeypatch):
    from anytron_cuda.attention import packed

    original = packed._cumulative
    monkeypatch.setattr(packed, "_cumulative", lambda *arguments: original(*arguments).long())
    with pytest.raises(RuntimeError, match="must have dtype int32"):
        sequences_of_two_lengths(name, spec())


@pytest.mark.parametrize("name", LIBRARIES)
def test_rows_that_nobody_wrote_are_noticed(name, monkeypatch):
    from anytron_cuda.attention import packed

    monkeypatch.setattr(packed._Side, "take", lambda side, buffer: buffer)
    monkeypatch.setattr(packed._Side, "put", lambda side, rows, total: rows)
    layer = spec()
    kernel, call = make(name, layer), packed_call(layer, [3, 6], [3, 6])
    with pytest.raises(AssertionError, match="not close"):
        assert_same(lambda q, k, v: kernel(q, k, v, call), defined(layer, [3, 6]), operands(11, 11, layer))


@pytest.mark.parametrize("case", LAYERS)
def test_what_is_compared_on_a_gpu(case, monkeypatch):
    layer, visible = spec(**LAYERS[case]), definition.visible
    assert_computes(make("varlen", layer), layer, "cpu")
    monkeypatch.setattr(definition, "visible", lambda *pairs: visible(*pairs).index_fill(1, torch.tensor(0), False))
    with pytest.raises(AssertionError, match="is off by"):
        assert_computes(make("varlen", layer), layer, "cpu")


def test_what_is_compared_of_masks_on_a_gpu(monkeypatch):
    from anytron_cuda.attention import fused_sdpa

    layer, attend = spec(True, None, 64, 32, 8, 2), fused_sdpa.attend
    assert_computes_masks(make("sdpa", layer), layer, "cpu")
    repeated = lambda q, k, v, **rest: attend(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1), **rest)  # noqa: E731
    monkeypatch.setattr(fused_sdpa, "attend", repeated)
    with pytest.raises(AssertionError, match="is off by"):
        assert_computes_masks(make("sdpa", layer), layer, "cpu")
