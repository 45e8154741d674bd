"""A complete third-party platform, from its own folder, through the same loader as every other.

What only its authors can know, its own tests check (examples/third_party_platform/tests).
"""

from __future__ import annotations

import sys

import pytest
import torch

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.hooks.registry import specifications
from anytron.device.loading import check_requirements, examine_requirements, hooks_of, open_session
from anytron.device.platform import Decision, decisions_of
from anytron.kernels.contract import AttentionCall, AttentionSpec, KernelName, KernelSpec, LogProbSpec
from anytron.kernels.oracles.masks import defined_pairs, read_flash_attention, read_transformer_engine
from anytron.sequences.layout import LayoutConstraints, ModelInputs
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest
from anytron.sequences.planning import plan_layout
from tests.third_party_platform import USABLE, install_into


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session on the platform, found by metadata as an installed distribution is."""
    for path in install_into(tmp_path):
        monkeypatch.syspath_prepend(path)
    for name, value in USABLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron")
    monkeypatch.delenv("ANYTRON_PLATFORM", raising=False)
    yield open_session(options={"tile": 4})
    for name in [name for name in sys.modules if name.partition(".")[0] in ("anytron_basalt", "basalt_sdk")]:
        del sys.modules[name]


def test_it_implements_every_hook(session):
    report = next(report for report in session.reports if report.name == "basalt")
    assert report.hooks == tuple(specifications())
    assert session.platform.ray_resource == "BASALT"
    assert session.platform.name == "basalt", "an accelerator that is usable wins over the processor"


def test_its_requirements_fit(session):
    assert check_requirements(session.hooks) == []
    (found,) = examine_requirements(session.hooks.requirements(None))
    assert found.as_line().startswith("basalt-sdk>=1.2,<2: 1.2.0 in ")


def test_it_says_what_it_has_decided(session):
    assert [str(one) for one in decisions_of(session.platform)] == ["tile: 4 (platform.options.tile says so)"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (["tile"], "'tile' is not a Decision"),
        ([Decision("tile", "4", "")] * 2, "more than one has the name tile"),
    ],
)
def test_a_platform_that_decides_otherwise_is_named(session, monkeypatch, answer, why):
    monkeypatch.setattr(session.platform, "decisions", lambda: answer)
    with pytest.raises(HookContractError, match="Platform 'basalt'") as caught:
        decisions_of(session.platform)
    assert why in caught.value.why


def test_a_micro_batch_comes_back_as_it_went_in(session):
    layout, tokens = plan_layout([3, 6], constraints=LayoutConstraints(align=4)), torch.arange(9)
    inputs = ModelInputs(layout, layout.pack(tokens), layout.position_ids, layout.next_tokens(tokens))
    inputs = session.hooks.preprocess_sequences(inputs)
    assert torch.equal(session.hooks.postprocess_output(inputs.input_ids, layout), tokens)


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
        read_mask = AttnMask(mask.kind, "causal") if mask.kernel_mode == "basalt_lengths" else mask
        assert read(read_mask, [layout], traits) == defined_pairs([3, 6], traits)


def test_its_kernels_are_known_as_its_own(session):
    hooks, traits = session.hooks, ModelTraits()
    hooks.attention_kernel(AttentionSpec(4, 2, 8, 8, 8**-0.5, traits))
    hooks.log_prob_kernel(LogProbSpec(16, 2, 4))  # not with tensor parallelism
    for name in (KernelName.SWIGLU, KernelName.RMS_NORM, KernelName.ROPE):
        hooks.fused_kernel(name, KernelSpec("cpu"))
    assert hooks.suppliers() == {
        "attention_kernel": "basalt",
        "fused_kernel rms_norm": "basalt",
        "fused_kernel rope": "neutral-default",
        "fused_kernel swiglu": "basalt",
        "log_prob_kernel": "neutral-default",
    }


def same(operands, results):
    """Compare two results, and the gradients that they give their operands."""
    outputs = [torch.stack(result) if isinstance(result, tuple) else result for result in results]
    weights = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
    gradients = [torch.autograd.grad((output * weights).sum(), operands) for output in outputs]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, (2, 0), (1, 1)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mode", ["padding_causal", "padding", "causal", "arbitrary"])
def test_its_attention_agrees_with_the_neutral_one(session, mode, sinks, window):
    """They were written independently of each other."""
    spec = AttentionSpec(4, 2, 8, 6, 8**-0.5, ModelTraits(causal="causal" in mode, window=window), sinks=sinks)
    padded = mode in ("causal", "arbitrary")
    operands = drawn(*((2, 7, *rest) if padded else (7, *rest) for rest in ((4, 8), (2, 8), (2, 6))), (4,))
    extra = {"sinks": operands[3]} if sinks else {}
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    if padded:
        mask = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[0, 0, 2] = True  # a row that sees nothing
        call = AttentionCall("bshd", mode, mask=mask if mode == "arbitrary" else None, **extra)
    else:
        call = AttentionCall("thd", mode, *[cu_seqlens] * 4, 4, 4, **extra)
    operands = operands[: 4 if sinks else 3]
    same(operands, [hooks.attention_kernel(spec)(*operands[:3], call) for hooks in (session.hooks, hooks_of())])


def test_its_other_kernels_agree_with_the_neutral_ones(session):
    both, spec = (session.hooks, hooks_of()), KernelSpec("cpu")
    (halves,) = drawn((3, 10))
    same([halves], [hooks.fused_kernel(KernelName.SWIGLU, spec)(halves) for hooks in both])
    rows = drawn((3, 2, 10), (10,))
    for centred in (False, True):
        same(rows, [hooks.fused_kernel(KernelName.RMS_NORM, spec)(*rows, 0.1, centred) for hooks in both])
    weighted = drawn((6, 5), (16, 5))
    labels = torch.tensor([1, 12, -100, 0, 7, 3])
    same(weighted, [hooks.log_prob_kernel(LogProbSpec(13, 1, 4))(*weighted, labels, 0.7, None) for hooks in both])
