"""The attention module gives kernels what the platform answers: its masks, its modes, its sinks."""

from __future__ import annotations

import pytest
import torch

from anytron import hookimpl
from anytron.base.errors import EngineError, HookContractError
from anytron.device.loading import hooks_of
from anytron.sequences.masks import AttnMask, MaskKind, Polarity, scope_of
from anytron_megatron.portable_te.binding import bind
from tests.backends.megatron.portable_te.attention_cases import LENGTHS, cumulative, module, operands

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
    with scope_of(answer)(), pytest.raises(HookContractError, match=r"(?s)'chip_lengths'.*plugin 'chip' returned"):
        module()(*operands(1, 4), qkv_format="bshd")


def test_the_mask_of_another_micro_batch_is_refused(bound):
    with scope_of(NEGATED)(), pytest.raises(EngineError, match="does not match this layer"):
        module()(*operands(1, 5), qkv_format="bshd")


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
