"""What only Basalt's authors can know; everything else is the conformance kit's business."""

from __future__ import annotations

import sys

import basalt_sdk
import pytest
import torch
from basalt_sdk import LONGEST_SEQUENCE

from anytron import (
    Availability,
    ConfigError,
    EngineError,
    LayoutRequest,
    Ledger,
    ModelTraits,
    ParallelSizes,
    PatchContext,
    Phase,
    ProcessInfo,
    RunConfig,
    hooks_of,
)
from anytron.kernels import AttentionCall, AttentionSpec
from anytron.sequences import LayoutConstraints, MaskKind, MaskRequest, ModelInputs, plan_layout, scopes
from anytron_basalt import BasaltPlatform, platform
from anytron_basalt.attention import LENGTHS
from anytron_basalt.options import BasaltOptions

TRAITS, SIZES = ModelTraits(), ParallelSizes()


@pytest.fixture
def basalt():
    made = BasaltPlatform()
    made.configure_options(BasaltOptions(tile=4))
    return made


@pytest.fixture
def hooks(basalt):
    return hooks_of(basalt)


def config(**sections):
    needed = {"model": {"path": "x"}, "data": {"source": "jsonl"}, "rewards": [{"function": "exact"}]}
    return RunConfig.model_validate({**needed, **sections})


# ---- the device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "found", "reason"),
    [
        ("2", Availability.USABLE, "the driver reports 2"),
        ("0", Availability.ABSENT, "the driver reports no device"),
        ("?", Availability.BROKEN, "the driver answers '?'"),
    ],
)
def test_the_probe_says_what_the_driver_says(basalt, monkeypatch, driver, found, reason):
    monkeypatch.setenv("BASALT_DEVICES", driver)
    probe = basalt.probe()
    assert (probe.availability, probe.reason) == (found, reason)
    assert bool(probe.remedy) == (found is not Availability.USABLE)


@pytest.mark.parametrize(("there", "found"), [(False, Availability.ABSENT), (True, Availability.BROKEN)])
def test_a_device_without_its_library_is_broken_and_never_ignored(basalt, monkeypatch, tmp_path, there, found):
    monkeypatch.setitem(sys.modules, "basalt_sdk", None)
    monkeypatch.setattr(platform, "DEVICE", tmp_path if there else tmp_path / "absent")
    assert basalt.probe().availability is found


# ---- the configuration --------------------------------------------------------------------------------


def test_micro_batches_are_made_to_fit_into_the_memory(hooks):
    edited, edits, _ = hooks.configure(config())
    assert edited.engine.max_tokens_per_micro_batch == 4096
    assert [plugin for plugin, edit in edits if edit.key.startswith("engine.")] == ["basalt"]


def test_responses_are_generated_with_the_attention_that_the_compiler_knows(hooks):
    assert hooks.configure(config())[0].rollout.options == {"attn_implementation": "eager"}
    own = config(rollout={"options": {"attn_implementation": "sdpa"}})
    assert hooks.configure(own)[0].rollout.options == {"attn_implementation": "sdpa"}, "the user's word is the last"


def test_sequences_whose_positions_have_no_number_are_refused(hooks):
    hooks.configure(config(rollout={"max_new_tokens": LONGEST_SEQUENCE - 1}))
    with pytest.raises(ConfigError, match="15 bits"):
        hooks.configure(config(rollout={"max_new_tokens": LONGEST_SEQUENCE}))


@pytest.mark.parametrize(("role", "given"), [("trainer", {"BASALT_TILE": "4"}), ("rollout", {})])
def test_training_ranks_get_their_tile(hooks, role, given):
    assert hooks.runtime_env(ProcessInfo(role), config()) == given


# ---- the library --------------------------------------------------------------------------------------


def ledger_for(basalt, hooks):
    context = PatchContext(basalt, "trainer", hooks, "megatron")
    made = Ledger(context=context)
    made.apply(Phase.BEFORE_BUILD, hooks.patch_model(Phase.BEFORE_BUILD, context))
    return made


def test_only_with_the_patch_the_library_reads_tiles_of_the_options(basalt, hooks):
    assert basalt_sdk.tiles(12) == 1
    ledger = ledger_for(basalt, hooks)
    assert basalt_sdk.tiles(12) == 3
    assert [one["detail"] for one in ledger.report()] == ["was 16"]
    ledger.undo()
    assert basalt_sdk.tiles(12) == 1


def test_a_library_without_the_fault_is_not_patched(basalt, hooks, monkeypatch, tmp_path):
    metadata = tmp_path / "basalt_sdk-1.3.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: basalt-sdk\nVersion: 1.3.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    (patch,) = ledger_for(basalt, hooks).report()
    assert patch["outcome"] == "skipped"
    assert basalt_sdk.TILE == 16


def test_sequences_are_whole_tiles(basalt):
    assert basalt.layout_constraints(LayoutRequest("thd", TRAITS, SIZES)) == LayoutConstraints(align=4)


def micro_batch(hooks, lengths):
    layout = plan_layout(lengths, constraints=LayoutConstraints(align=4))
    tokens = torch.arange(sum(lengths))
    inputs = ModelInputs(layout, layout.pack(tokens), layout.position_ids, layout.next_tokens(tokens))
    return layout, hooks.preprocess_sequences(inputs)


def test_the_library_has_the_lengths_as_long_as_the_micro_batch_runs(hooks):
    layout, inputs = micro_batch(hooks, [3, 6])
    assert layout.padded_lengths.tolist() == [4, 8]
    with scopes.enter(inputs.scope):
        assert basalt_sdk.lengths() == (3, 6)
        with scopes.enter(inputs.scope):
            pass
        assert basalt_sdk.lengths() == (3, 6), "recomputation enters it again, inside"
    assert basalt_sdk.lengths() is None


# ---- attention ----------------------------------------------------------------------------------------


def attend(hooks, layout):
    mask = hooks.build_attn_mask(MaskRequest("thd", TRAITS, SIZES, frozenset({MaskKind.NONE}), layout))
    assert mask.kernel_mode == LENGTHS
    lengths, starts = layout.cu_seqlens, layout.cu_seqlens_padded
    call = AttentionCall("thd", mask.kernel_mode, lengths, lengths, starts, starts)
    kernel = hooks.attention_kernel(AttentionSpec(4, 2, 8, 8, 8**-0.5, TRAITS))
    rows = layout.shape[1]
    return kernel(*(torch.ones(rows, heads, 8) for heads in (4, 2, 2)), call)


def test_packed_sequences_have_no_mask_tensor_because_the_library_has_their_lengths(hooks):
    layout, inputs = micro_batch(hooks, [3, 6])
    with scopes.enter(inputs.scope):
        out = attend(hooks, layout)
    assert out.sum(dim=(1, 2)).ne(0).tolist() == layout.valid[0].tolist()


@pytest.mark.parametrize(("context", "traits"), [(2, TRAITS), (1, ModelTraits(mixture_of_experts=True))])
def test_other_masks_are_left_to_the_neutral_default(hooks, context, traits):
    request = MaskRequest("thd", traits, ParallelSizes(context=context), frozenset({MaskKind.NONE}))
    assert hooks.build_attn_mask(request).kernel_mode == "padding_causal"


def test_the_kernel_refuses_lengths_of_another_micro_batch(hooks):
    (layout, _), (_, other) = micro_batch(hooks, [3, 6]), micro_batch(hooks, [3, 5])
    with scopes.enter(other.scope), pytest.raises(EngineError, match="other sequences"):
        attend(hooks, layout)


def test_the_kernel_refuses_sequences_that_start_within_a_tile(hooks):
    _, inputs = micro_batch(hooks, [3, 6])
    with scopes.enter(inputs.scope), pytest.raises(EngineError, match="at a tile"):
        attend(hooks, plan_layout([3, 6]))
