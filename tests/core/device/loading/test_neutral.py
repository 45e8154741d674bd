"""The neutral default's masks: the pairs that they let through are those of the definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.loading import hooks_of
from anytron.sequences.layout import ContextShard
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest, Polarity
from anytron.sequences.planning import plan_layout

LENGTHS = [3, 1, 5]
NONE, PADDING, FULL = MaskKind.NONE, MaskKind.PADDING_2D, MaskKind.FULL_4D


def ask(format, accepted, *, layout=True, context=1, **traits) -> AttnMask:
    shard = ContextShard(context)
    request = MaskRequest(
        format=format,
        traits=ModelTraits(**traits),
        parallel=ParallelSizes(context=context),
        accepted=frozenset(accepted),
        layout=plan_layout(LENGTHS, format=format, tensor_parallel=2, shard=shard) if layout else None,
    )
    return hooks_of().build_attn_mask(request)


@pytest.mark.parametrize(
    ("format", "causal", "accepted", "kind", "mode"),
    [
        ("thd", True, [NONE, PADDING, FULL], NONE, "padding_causal"),
        ("thd", False, [NONE, PADDING], NONE, "padding"),
        ("thd", True, [PADDING], PADDING, "padding_causal"),
        ("bshd", True, [NONE, PADDING, FULL], NONE, "causal"),
        ("bshd", True, [PADDING, FULL], PADDING, "causal"),
        ("bshd", True, [FULL], FULL, "arbitrary"),
        ("bshd", False, [NONE, PADDING, FULL], PADDING, "padding"),
        ("bshd", False, [NONE, FULL], FULL, "arbitrary"),
    ],
)
def test_the_cheapest_exact_form_that_is_accepted(format, causal, accepted, kind, mode):
    built = ask(format, accepted, layout=False, causal=causal)
    assert (built.kind, built.kernel_mode, built.tensor) == (kind, mode, None)
    mask = ask(format, accepted, causal=causal)
    assert (mask.kind, mask.kernel_mode) == (kind, mode), "the same as at engine build"
    assert (mask.tensor is None) == (kind is NONE)


@pytest.mark.parametrize(
    ("format", "accepted", "context", "causal"),
    [
        ("thd", [FULL], 1, True),
        ("bshd", [NONE], 1, False),
        ("bshd", [FULL], 2, True),
        ("thd", [], 1, True),
    ],
)
def test_where_no_accepted_form_is_exact_it_refuses(format, accepted, context, causal):
    with pytest.raises(HookContractError, match="cannot build a mask that this model accepts"):
        ask(format, accepted, layout=False, context=context, causal=causal)


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_the_2d_map_is_the_real_tokens_of_all_shards(format, context):
    mask = ask(format, [PADDING], context=context)
    columns = mask.tensor.shape[1]
    assert mask.polarity is Polarity.KEEP
    assert mask.tensor.tolist() == [[column < length for column in range(columns)] for length in LENGTHS]
    assert columns >= max(LENGTHS)


@pytest.mark.parametrize("window", [None, (1, 0), (-1, 0), (2, -1), (0, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_full_mask_is_the_definition(causal, window):
    mask = ask("bshd", [FULL], causal=causal, window=window)
    assert mask.polarity is Polarity.MASKED
    size = mask.tensor.shape[-1]
    for row, (query, key) in itertools.product(range(len(LENGTHS)), itertools.product(range(size), repeat=2)):
        real = query < LENGTHS[row] and key < LENGTHS[row]
        left, right = window or (-1, -1)
        in_window = (left < 0 or key >= query - left) and (right < 0 or key <= query + right)
        allowed = real and in_window and (key <= query or not causal)
        assert bool(mask.tensor[row, 0, query, key]) is not allowed


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_padding_and_linear_attention_maps_come_where_someone_reads_them(format):
    plain = ask(format, [NONE])
    assert plain.padding_mask is None
    assert plain.linear_attn_mask is None
    mask = ask(format, [NONE], mixture_of_experts=True, linear_attention=True)
    layout = plan_layout(LENGTHS, format=format, tensor_parallel=2)
    assert torch.equal(mask.padding_mask, ~layout.valid)
    assert mask.linear_attn_mask.sum(1).tolist() == LENGTHS
