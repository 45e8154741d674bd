"""A mask that breaks its contract is refused, and the refusal names the plugin and the rule."""

import dataclasses

import pytest
import torch

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest, Polarity, check_mask, current_mask, scope_of
from anytron.sequences.planning import plan_layout

LAYOUT = plan_layout([3, 2], format="bshd")
REQUEST = MaskRequest(
    "bshd", ModelTraits(), ParallelSizes(), frozenset({MaskKind.NONE, MaskKind.FULL_4D, MaskKind.PADDING_2D}), LAYOUT
)


def full(shape=(2, 1, 3, 3), dtype=torch.bool):
    return AttnMask(MaskKind.FULL_4D, "arbitrary", torch.zeros(shape, dtype=dtype), Polarity.MASKED)


def test_fitting_masks_pass():
    check_mask(full(), REQUEST, None, "toy")
    check_mask(AttnMask(MaskKind.NONE, "causal"), REQUEST, None, "toy")
    check_mask(AttnMask(MaskKind.PADDING_2D, "padding", LAYOUT.valid, Polarity.KEEP), REQUEST, None, "toy")


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (full((2, 3, 3)), "must have the shape of its kind"),
        (full(dtype=torch.int64), "masks must be bool"),
        (AttnMask(MaskKind.FULL_4D, "arbitrary"), "needs a tensor"),
    ],
)
def test_a_broken_answer_names_plugin_and_rule(mask, rule):
    with pytest.raises(HookContractError, match=rule) as caught:
        check_mask(mask, REQUEST, None, "toy")
    assert caught.value.where == "plugin toy"


def test_a_kind_that_cannot_reach_the_model_is_refused():
    request = dataclasses.replace(REQUEST, accepted=frozenset({MaskKind.NONE}))
    with pytest.raises(HookContractError, match="one that the model accepts") as caught:
        check_mask(full(), request, None, "toy")
    assert caught.value.why == "it is full-4d, not one of: none"


@pytest.mark.parametrize("name", ["padding_mask", "linear_attn_mask"])
@pytest.mark.parametrize(
    ("tensor", "rule"),
    [(LAYOUT.valid.long(), "masks must be bool"), (LAYOUT.valid[:1], "must have the shape of its kind")],
)
def test_the_maps_beside_the_mask_are_held_to_the_same_rules(name, tensor, rule):
    with pytest.raises(HookContractError, match=rule) as caught:
        check_mask(AttnMask(MaskKind.NONE, "causal", **{name: tensor}), REQUEST, None, "toy")
    assert name in caught.value.why


def test_recurrent_layers_need_the_map_of_padded_rows():
    def check(format, **maps):
        layout = plan_layout([3, 2], format=format)
        accepted = frozenset({MaskKind.NONE})
        request = MaskRequest(format, ModelTraits(linear_attention=True), ParallelSizes(), accepted, layout)
        check_mask(AttnMask(MaskKind.NONE, "causal", **maps), request, None, "toy")

    with pytest.raises(HookContractError, match="recurrent layers in bshd need linear_attn_mask"):
        check("bshd")
    check("bshd", linear_attn_mask=LAYOUT.valid)
    check("thd")


def test_the_map_of_padded_rows_covers_all_their_columns():
    layout = plan_layout([3, 2], format="bshd", tensor_parallel=4)
    request = MaskRequest("bshd", ModelTraits(linear_attention=True), ParallelSizes(), REQUEST.accepted, layout)
    check_mask(AttnMask(MaskKind.NONE, "causal", linear_attn_mask=layout.valid), request, None, "toy")
    with pytest.raises(HookContractError, match="must have the shape of its kind"):
        check_mask(AttnMask(MaskKind.NONE, "causal", linear_attn_mask=LAYOUT.valid), request, None, "toy")


def test_what_is_no_mask_at_all_is_refused():
    with pytest.raises(HookContractError, match="its result must be an AttnMask") as caught:
        check_mask(LAYOUT.valid, REQUEST, None, "toy")
    assert caught.value.where == "plugin toy"


def test_an_answer_of_another_kind_than_at_build_is_refused():
    built = AttnMask(MaskKind.NONE, "causal")
    with pytest.raises(HookContractError, match="as they were when the engine was built"):
        check_mask(full(), REQUEST, built, "toy")
    with pytest.raises(HookContractError, match="as they were when the engine was built"):
        check_mask(AttnMask(MaskKind.NONE, "padding_causal"), REQUEST, built, "toy")


def test_a_tensor_without_polarity_cannot_be_written():
    with pytest.raises(HookContractError, match="polarity"):
        AttnMask(MaskKind.FULL_4D, "arbitrary", torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(HookContractError, match="must be Polarity"):
        AttnMask(MaskKind.PADDING_2D, "padding", LAYOUT.valid, True)
    with pytest.raises(HookContractError, match="must not have a tensor"):
        AttnMask(MaskKind.NONE, "causal", torch.zeros(1), Polarity.KEEP)


@pytest.mark.parametrize(
    ("kind", "models_read"),
    [
        (MaskKind.PADDING_2D, Polarity.KEEP),
        (MaskKind.FULL_4D, Polarity.MASKED),
    ],
)
def test_a_model_gets_the_polarity_that_it_reads_whatever_a_plugin_wrote(kind, models_read):
    tensor = torch.tensor([[True, False]])
    as_read = AttnMask(kind, "any", tensor, models_read)
    (other,) = set(Polarity) - {models_read}
    assert as_read.for_model() is tensor
    assert torch.equal(AttnMask(kind, "any", ~tensor, other).for_model(), tensor)
    assert AttnMask(MaskKind.NONE, "any").for_model() is None


def test_the_mask_of_a_micro_batch_stands_in_its_scope():
    outer, inner = (AttnMask(MaskKind.NONE, mode) for mode in ("outer", "inner"))
    assert current_mask() is None
    with scope_of(outer)():
        with scope_of(inner)():
            assert current_mask().kernel_mode == "inner"
        assert current_mask().kernel_mode == "outer"
    assert current_mask() is None


@pytest.mark.parametrize("polarity", Polarity)
def test_kernels_find_a_full_mask_with_true_for_masked_whatever_a_plugin_wrote(polarity):
    masked = torch.ones(2, 1, 3, 3, dtype=torch.bool).triu(1)
    written = masked if polarity is Polarity.MASKED else ~masked
    with scope_of(AttnMask(MaskKind.FULL_4D, "arbitrary", written, polarity))():
        assert torch.equal(current_mask().tensor, masked)
        assert current_mask().polarity is Polarity.MASKED
