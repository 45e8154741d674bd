"""A complete third-party platform, from its own folder, through the same loader as every other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from anytron.config.schema import RunConfig
from anytron.errors import HookContractError
from anytron.hooks.registry import specifications
from anytron.hooks.types import LayoutRequest
from anytron.kernels.contract import AttentionCall, AttentionSpec, KernelName, KernelSpec, LogProbSpec
from anytron.masks import AttnMask, MaskKind, MaskRequest
from anytron.patches import Ledger, Phase
from anytron.platform import Decision, decisions_of
from anytron.plugins import check_requirements, open_session
from anytron.reference.masks import defined_pairs, read_flash_attention, read_transformer_engine
from anytron.sequences import LayoutConstraints, ModelInputs, plan_layout, scopes
from anytron.traits import ModelTraits, ParallelSizes

TOY = Path(__file__).parent / "toy_platform"


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session on the toy, found by metadata as an installed distribution is."""
    info = tmp_path / "anytron_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anytron-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[anytron.platforms]\ntoy = anytron_toy:ToyPlatform\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.setenv("TOY_DEVICE", "usable")
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron")
    monkeypatch.delenv("ANYTRON_PLATFORM", raising=False)
    yield open_session(options={"tile": 4})
    for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_toy"]:
        del sys.modules[name]


def test_it_implements_every_hook(session):
    report = next(report for report in session.reports if report.name == "toy")
    assert report.hooks == tuple(specifications())
    assert session.platform.ray_resource == "TOY"
    assert session.platform.name == "toy", "an accelerator that is usable wins over the processor"


def test_its_requirements_fit(session):
    assert check_requirements(session.hooks) == []


def test_it_says_what_it_has_decided(session):
    assert [str(one) for one in decisions_of(session.platform)] == ["tile: 4 (platform.options.tile says so)"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [(["tile"], "'tile', which is no Decision"), ([Decision("tile", "4", "")] * 2, "decided twice: tile, tile")],
)
def test_a_platform_that_decides_otherwise_is_named(session, monkeypatch, answer, why):
    monkeypatch.setattr(session.platform, "decisions", lambda: answer)
    with pytest.raises(HookContractError, match="Platform 'toy'") as caught:
        decisions_of(session.platform)
    assert why in caught.value.why


def test_it_edits_the_configuration(session):
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "data": {"source": "jsonl"}, "rewards": [{"function": "exact"}]}
    )
    edited, edits, _ = session.hooks.configure(config)
    assert edited.engine.max_tokens_per_micro_batch == 4096
    assert [plugin for plugin, _ in edits] == ["toy"]


def test_its_patch_is_applied_and_undone(session):
    from anytron_toy import vendor

    from anytron.hooks.types import PatchContext

    context = PatchContext(session.platform, "trainer", session.hooks, "megatron")
    ledger = Ledger(context=context)
    ledger.apply(Phase.BEFORE_BUILD, session.hooks.patch_model(Phase.BEFORE_BUILD, context))
    assert vendor.TILE == 4
    ledger.undo()
    assert vendor.TILE == 16


def test_a_micro_batch_goes_through_its_hooks(session):
    from anytron_toy import vendor

    hooks, traits, sizes = session.hooks, ModelTraits(), ParallelSizes()
    constraints = hooks.layout_constraints(LayoutRequest("thd", traits, sizes))
    layout = plan_layout([3, 6], constraints=constraints)
    assert layout.padded_lengths.tolist() == [4, 8]
    tokens = torch.arange(9)
    inputs = ModelInputs(layout, layout.pack(tokens), layout.position_ids, layout.next_tokens(tokens))
    inputs = hooks.preprocess_sequences(inputs)
    with scopes.enter(inputs.scope):
        assert vendor.ACTUAL_LENGTHS == [3, 6]
    assert vendor.ACTUAL_LENGTHS is None
    request = MaskRequest("thd", traits, sizes, frozenset({MaskKind.NONE}), layout)
    assert hooks.build_attn_mask(request).kernel_mode == "toy_lengths"
    assert torch.equal(hooks.postprocess_output(inputs.input_ids, layout), tokens)


def test_what_it_leaves_open_the_neutral_default_answers(session):
    request = MaskRequest("bshd", ModelTraits(), ParallelSizes(), frozenset({MaskKind.NONE}))
    assert session.hooks.build_attn_mask(request).kernel_mode == "causal"


def test_its_masks_are_exact(session):
    """In thd its library attends sequence by sequence, causally, as flash-attn does; in bshd as Transformer Engine."""
    traits, accepted = ModelTraits(), frozenset({MaskKind.NONE})
    readers = {"thd": read_flash_attention, "bshd": read_transformer_engine}
    for sequence_format, read in readers.items():
        layout = plan_layout([3, 6], format=sequence_format, constraints=LayoutConstraints(align=4))
        request = MaskRequest(sequence_format, traits, ParallelSizes(), accepted, layout)
        mask = session.hooks.build_attn_mask(request)
        read_mask = AttnMask(mask.kind, "causal") if mask.kernel_mode == "toy_lengths" else mask
        assert read(read_mask, [layout], traits) == defined_pairs([3, 6], traits)


def test_its_kernels_are_known_as_its_own(session):
    hooks, traits = session.hooks, ModelTraits()
    hooks.attention_kernel(AttentionSpec(4, 2, 8, 8, 8**-0.5, traits))
    hooks.log_prob_kernel(LogProbSpec(16, 2, 4))  # not with tensor parallelism
    for name in (KernelName.SWIGLU, KernelName.RMS_NORM):
        hooks.fused_kernel(name, KernelSpec("cpu"))
    assert hooks.suppliers() == {
        "attention_kernel": "toy",
        "fused_kernel rms_norm": "neutral-default",
        "fused_kernel swiglu": "toy",
        "log_prob_kernel": "neutral-default",
    }


def test_its_kernels_agree_with_the_neutral_ones(session):
    """The toy's kernels and the neutral ones were written independently of each other."""
    from anytron.plugins import hooks_of

    neutral = hooks_of()
    generator = torch.Generator().manual_seed(0)
    spec = AttentionSpec(4, 2, 8, 8, 8**-0.5, ModelTraits())
    query, key, value = (torch.randn(7, heads, 8, generator=generator) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    call = AttentionCall("thd", "padding_causal", cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, 4, 4)
    outs = [hooks.attention_kernel(spec)(query, key, value, call) for hooks in (session.hooks, neutral)]
    torch.testing.assert_close(*outs)
    halves = torch.randn(3, 10, generator=generator)
    fused = [hooks.fused_kernel(KernelName.SWIGLU, KernelSpec("cpu"))(halves) for hooks in (session.hooks, neutral)]
    torch.testing.assert_close(*fused)
    hidden, weight = torch.randn(6, 5, generator=generator), torch.randn(16, 5, generator=generator)
    labels = torch.tensor([1, 15, -100, 0, 7, 3])
    scores = [
        hooks.log_prob_kernel(LogProbSpec(16, 1, 4))(hidden, weight, labels, 0.7, None)
        for hooks in (session.hooks, neutral)
    ]
    torch.testing.assert_close(*scores)
