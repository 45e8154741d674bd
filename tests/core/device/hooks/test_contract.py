"""The contract of each hook, as callers of the facade see it: one or more tests named after each hook."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from anytron import Platform, hookimpl
from anytron.base.errors import ConfigError, HookContractError, PluginError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.config.diagnostics import Diagnostic
from anytron.config.schema import RunConfig, default_run
from anytron.device.hooks.facade import Hooks
from anytron.device.hooks.types import ConfigEdit, PatchContext, ProcessInfo, Requirement
from anytron.device.loading import hooks_of
from anytron.device.patches import Patch, Phase
from anytron.device.platform import LayoutRequest, layout_constraints_of
from anytron.kernels.contract import AttentionSpec, KernelName, KernelSpec, LogProbSpec
from anytron.sequences.layout import LayoutConstraints, ModelInputs
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest
from anytron.sequences.planning import plan_layout

CONFIG = {
    "model": {"path": "somewhere"},
    "data": {"source": "jsonl"},
    "rewards": [{"function": "exact"}],
    "trainer": {"seed": 7},
}
RUN = default_run({"engine": {"deterministic": True}})


def answering(**answers):
    """A plugin that implements the given hooks; a callable answers with its result, taking all arguments."""

    def method(name, answer):
        from anytron.device.hooks.registry import specifications

        arguments = ", ".join(specifications()[name].arguments)
        source = f"def {name}({', '.join(filter(None, ['self', arguments]))}): return answer({arguments})"
        scope = {"answer": answer if callable(answer) else lambda *_: answer}
        exec(source, scope)
        return hookimpl(scope[name])

    return type("Plugin", (), {name: method(name, answer) for name, answer in answers.items()})()


def hooks_with(**plugins):
    return hooks_of(extensions=plugins)


@pytest.fixture
def inputs() -> ModelInputs:
    layout = plan_layout([3, 2])
    ids = layout.pack(torch.arange(5))
    return ModelInputs(layout, ids, layout.position_ids, layout.next_tokens(torch.arange(5)))


# ---- requirements ---------------------------------------------------------------------------------


def test_requirements_come_with_their_plugin():
    need = Requirement("torch", ">=2")
    assert hooks_with(acme=answering(requirements=[need]), mute=answering(requirements=None)).requirements() == [
        ("acme", need)
    ]


def test_requirements_may_depend_on_the_training_engine():
    need = Requirement("torch", ">=2")
    hooks = hooks_with(acme=answering(requirements=lambda engine: [need] if engine == "fast" else []))
    assert (hooks.requirements("fast"), hooks.requirements()) == ([("acme", need)], [])


def test_requirements_of_another_class_break_the_contract():
    with pytest.raises(HookContractError, match="'acme'"):
        hooks_with(acme=answering(requirements=["torch"])).requirements()


# ---- configure ------------------------------------------------------------------------------------


def test_configure_applies_edits_and_keeps_the_rest():
    edit = ConfigEdit("engine.max_tokens_per_micro_batch", 512, "small memory")
    option = ConfigEdit("engine.options.attention_dropout", 0.0, "no dropout kernel")
    before = RunConfig.model_validate(CONFIG)
    after, edits, warnings = hooks_with(acme=answering(configure=[edit, option])).configure(before)
    assert after.engine.max_tokens_per_micro_batch == 512
    assert after.engine.options == {"attention_dropout": 0.0}
    assert after.trainer == before.trainer
    assert before.engine.max_tokens_per_micro_batch != 512
    assert edits == [("acme", edit), ("acme", option)]
    assert warnings == []


def test_configure_passes_warnings_on():
    warning = Diagnostic("warning", "model.dtype", "slow")
    config = RunConfig.model_validate(CONFIG)
    _, edits, (passed_on,) = hooks_with(acme=answering(configure=[warning])).configure(config)
    assert edits == []
    assert passed_on == dataclasses.replace(warning, message="slow (plugin 'acme')")


def test_configure_collects_every_error_of_every_plugin():
    plugins = {
        "one": answering(configure=[Diagnostic("error", "model.dtype", "no bfloat16", "model.dtype=float32")]),
        "two": answering(configure=[Diagnostic("error", "engine.recompute", "no recompute")]),
    }
    with pytest.raises(ConfigError) as caught:
        hooks_with(**plugins).configure(RunConfig.model_validate(CONFIG))
    assert caught.value.why.splitlines()[1:] == [
        "    model.dtype: no bfloat16 (plugin 'one') - model.dtype=float32",
        "    engine.recompute: no recompute (plugin 'two')",
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("engine.max_token_per_micro_batch", "did you mean engine.max_tokens_per_micro_batch"),
        ("engin.recompute", "did you mean engine"),
        ("trainer.seed.value", "does not exist"),
        ("engine", "whole section"),
    ],
)
def test_configure_refuses_keys_that_do_not_exist(key, message):
    plugin = answering(configure=[ConfigEdit(key, 1, "why not")])
    with pytest.raises(ConfigError, match=message):
        hooks_with(acme=plugin).configure(RunConfig.model_validate(CONFIG))


def test_configure_refuses_values_that_the_schema_refuses():
    plugin = answering(configure=[ConfigEdit("trainer.total_steps", -1, "why not")])
    with pytest.raises(ConfigError, match=r"trainer.total_steps \(plugin 'acme'\)"):
        hooks_with(acme=plugin).configure(RunConfig.model_validate(CONFIG))


@pytest.mark.parametrize(
    ("first", "second"),
    [(("trainer.seed", 1), ("trainer.seed", 2)), (("engine.options", {}), ("engine.options.x", 1))],
)
def test_configure_conflict_names_both_plugins(first, second):
    plugins = {
        "one": answering(configure=[ConfigEdit(*first, "a")]),
        "two": answering(configure=[ConfigEdit(*second, "b")]),
    }
    with pytest.raises(ConfigError, match=r"(?s)'one'.*'two'"):
        hooks_with(**plugins).configure(RunConfig.model_validate(CONFIG))


def test_configure_lets_two_plugins_agree():
    plugins = {name: answering(configure=[ConfigEdit("trainer.seed", 3, name)]) for name in ("one", "two")}
    assert hooks_with(**plugins).configure(RunConfig.model_validate(CONFIG))[0].trainer.seed == 3


def test_configure_sets_a_default_where_the_user_has_set_nothing():
    def preferred(key, value):
        return ConfigEdit(key, value, "it is better", default=True)

    options = "rollout.options.engine_args"
    plugin = answering(
        configure=[
            preferred("trainer.seed", 3),
            preferred("rollout.options.attn_implementation", "eager"),
            preferred(f"{options}.inner.enabled", True),
            preferred(f"{options}.mode.fast", True),
        ]
    )
    other = answering(configure=[preferred("trainer.seed", 4)])
    user = {**CONFIG, "rollout": {"options": {"engine_args": {"inner": {"nz": 1}, "mode": "mine"}}}}
    config, edits, _ = hooks_with(acme=plugin, other=other).configure(RunConfig.model_validate(user))
    assert config.trainer.seed == 7, "nor do plugins disagree on what the user has set"
    assert config.rollout.options == {
        "attn_implementation": "eager",
        "engine_args": {"inner": {"nz": 1, "enabled": True}, "mode": "mine"},
    }
    assert [edit.key for _, edit in edits] == ["rollout.options.attn_implementation", f"{options}.inner.enabled"]


# ---- runtime_env ----------------------------------------------------------------------------------


def test_runtime_env_merges_and_passes_the_process_and_the_run():
    plugin = answering(
        runtime_env=lambda process, config: {"ACME_RANK": f"{process.rank}, {config.engine.deterministic}"}
    )
    other = answering(runtime_env={"OTHER": "1"})
    assert hooks_with(acme=plugin, other=other).runtime_env(ProcessInfo("trainer", rank=3), RUN) == {
        "ACME_RANK": "3, True",
        "OTHER": "1",
    }


def test_runtime_env_keeps_what_the_user_set_and_says_so(monkeypatch, caplog):
    monkeypatch.setenv("ACME_MODE", "mine")
    hooks = hooks_with(acme=answering(runtime_env={"ACME_MODE": "yours"}))
    assert hooks.runtime_env(ProcessInfo("trainer"), RUN) == {"ACME_MODE": "mine"}
    assert "the environment variable ACME_MODE keeps its value mine; plugin 'acme' wanted yours" in caplog.text


def test_runtime_env_conflict_names_both_plugins():
    hooks = hooks_with(one=answering(runtime_env={"X": "1"}), two=answering(runtime_env={"X": "2"}))
    with pytest.raises(PluginError, match="'one' gives '1', 'two' gives '2'"):
        hooks.runtime_env(ProcessInfo("rollout"), RUN)


def test_runtime_env_values_are_strings():
    with pytest.raises(HookContractError, match="'acme'"):
        hooks_with(acme=answering(runtime_env={"X": 1})).runtime_env(ProcessInfo("driver"), RUN)


# ---- patch_model ----------------------------------------------------------------------------------


def _patch(phase: Phase) -> Patch:
    return Patch("acme.x", "math:pi", phase, "to test", replacement="math:floor")


class _NoDevice(Platform):
    name = "none"

    def probe(self):
        raise NotImplementedError

    def runtime(self):
        raise NotImplementedError


def test_patch_model_collects_the_patches_of_the_phase():
    plugin = answering(patch_model=lambda phase, context: [_patch(phase)])
    hooks = hooks_with(acme=plugin, mute=answering(patch_model=None))
    context = PatchContext(_NoDevice(), "trainer", hooks, "megatron")
    assert [patch.phase for patch in hooks.patch_model(Phase.BEFORE_BUILD, context)] == [Phase.BEFORE_BUILD]


def test_patch_model_refuses_a_patch_of_another_phase():
    hooks = hooks_with(acme=answering(patch_model=[_patch(Phase.AFTER_BUILD)]))
    with pytest.raises(HookContractError, match=r"(?s)'acme'.*acme.x is for after_build"):
        hooks.patch_model(Phase.BEFORE_IMPORT, PatchContext(_NoDevice(), "trainer", hooks, "megatron"))


# ---- layouts and micro-batches ---------------------------------------------------------------------


def test_a_platform_asks_for_layouts_and_must_answer_in_their_class(monkeypatch):
    platform, request = _NoDevice(), LayoutRequest("thd", ModelTraits(), ParallelSizes())
    assert layout_constraints_of(platform, request) == LayoutConstraints()
    monkeypatch.setattr(_NoDevice, "layout_constraints", lambda self, request: 8)
    with pytest.raises(HookContractError, match="'none' returned an invalid value from layout_constraints"):
        layout_constraints_of(platform, request)


def test_preprocess_sequences_is_a_chain_in_order_of_name_the_platform_last(inputs):
    seen = []

    def adding(name):
        def preprocess(given):
            seen.append((name, int(given.input_ids[0, 0])))
            return dataclasses.replace(given, input_ids=given.input_ids + 1)

        return preprocess

    class Chip(_NoDevice):
        @hookimpl
        def preprocess_sequences(self, inputs):
            return adding("platform")(inputs)

    plugins = {name: answering(preprocess_sequences=adding(name)) for name in ("zzz", "aaa")}
    out = hooks_of(Chip(), plugins).preprocess_sequences(inputs)
    assert seen == [("aaa", 0), ("zzz", 1), ("platform", 2)]
    assert torch.equal(out.input_ids, inputs.input_ids + 3)


def test_preprocess_sequences_none_means_as_it_is(inputs):
    assert hooks_with(acme=answering(preprocess_sequences=None)).preprocess_sequences(inputs) is inputs


def test_preprocess_sequences_keeps_layout_shape_and_dtype(inputs):
    changes = {
        "layout": plan_layout([3, 2]),
        "input_ids": inputs.input_ids.int(),
        "labels": inputs.labels[:, :-1],
        "position_ids": inputs.position_ids.int(),
    }
    for name, value in changes.items():
        plugin = answering(preprocess_sequences=dataclasses.replace(inputs, **{name: value}))
        with pytest.raises(HookContractError, match="'acme'"):
            hooks_with(acme=plugin).preprocess_sequences(inputs)


def test_preprocess_sequences_returns_inputs(inputs):
    with pytest.raises(HookContractError, match="ModelInputs"):
        hooks_with(acme=answering(preprocess_sequences=inputs.input_ids)).preprocess_sequences(inputs)


REQUEST = MaskRequest("thd", ModelTraits(), ParallelSizes(), frozenset({MaskKind.NONE}))


def test_build_attn_mask_takes_the_first_answer():
    mask = AttnMask(MaskKind.NONE, "acme")
    hooks = hooks_with(aaa=answering(build_attn_mask=None), acme=answering(build_attn_mask=mask))
    answer = hooks.build_attn_mask(REQUEST)
    assert (answer, answer.plugin) == (mask, "acme")


def test_build_attn_mask_names_the_plugin_whose_kind_is_not_accepted():
    hooks = hooks_with(acme=answering(build_attn_mask=AttnMask(MaskKind.FULL_4D, "arbitrary")))
    with pytest.raises(HookContractError, match="'acme'"):
        hooks.build_attn_mask(REQUEST)


def test_build_attn_mask_names_the_plugin_that_changes_its_mind():
    hooks = hooks_with(acme=answering(build_attn_mask=AttnMask(MaskKind.NONE, "other")))
    with pytest.raises(HookContractError, match=r"'acme'.*must stay as they were when the engine was built"):
        hooks.build_attn_mask(REQUEST, built=AttnMask(MaskKind.NONE, "causal"))


def test_postprocess_output_is_flat_and_complete(inputs):
    values = torch.randn(1, 5, 2)
    assert torch.equal(hooks_of().postprocess_output(values, inputs.layout), values[0])
    with pytest.raises(HookContractError, match=r"'acme'.*one entry for each real token"):
        hooks_with(acme=answering(postprocess_output=values)).postprocess_output(values, inputs.layout)


# ---- kernels --------------------------------------------------------------------------------------

ATTENTION = AttentionSpec(2, 1, 8, 8, 8**-0.5, ModelTraits())


def _kernel(*_arguments):
    """Stand for a kernel: only its identity is asked for."""


def _first_answer_and_never_none(hook, *arguments):
    given = answering(**{hook: lambda *_: _kernel})
    passing = answering(**{hook: lambda *_: None})
    assert getattr(hooks_with(aaa=passing, acme=given), hook)(*arguments) is _kernel
    assert callable(getattr(hooks_with(aaa=passing), hook)(*arguments)), "the neutral default answers"
    with pytest.raises(HookContractError, match="callable"):
        getattr(hooks_with(acme=answering(**{hook: lambda *_: 3})), hook)(*arguments)
    with pytest.raises(HookContractError, match="No plugin answered"):
        getattr(Hooks([]), hook)(*arguments)


def test_attention_kernel_is_the_first_answer_and_never_none():
    _first_answer_and_never_none("attention_kernel", ATTENTION)


@pytest.mark.parametrize("name", KernelName)
def test_fused_kernel_is_the_first_answer_and_never_none(name):
    _first_answer_and_never_none("fused_kernel", name, KernelSpec("cpu"))


def test_log_prob_kernel_is_the_first_answer_and_never_none():
    _first_answer_and_never_none("log_prob_kernel", LogProbSpec(16, 1, 64))


def test_the_facade_knows_which_plugin_supplied_which_kernel():
    """Only kernels that were asked for are listed; the neutral default is named like every other plugin."""
    plain = answering(attention_kernel=lambda spec: _kernel if not spec.sinks else None)
    hooks = hooks_with(acme=plain)
    assert hooks.suppliers() == {}
    hooks.attention_kernel(ATTENTION)
    hooks.fused_kernel(KernelName.RMS_NORM, KernelSpec("cpu"))
    assert hooks.suppliers() == {"attention_kernel": "acme", "fused_kernel rms_norm": "neutral-default"}
    hooks.attention_kernel(dataclasses.replace(ATTENTION, sinks=True))
    assert hooks.suppliers()["attention_kernel"] == "acme, neutral-default", "layers may differ"


def test_the_facade_logs_and_records_once_what_kernels_say_of_themselves(caplog):
    def described(name, spec):
        kernel = lambda *_: None  # noqa: E731 - takes an attribute
        kernel.description = f"quick (not quicker: {spec.dtype} is too wide)"
        return kernel if name is KernelName.ROPE else None

    hooks = hooks_with(acme=answering(fused_kernel=described))
    with caplog.at_level("INFO", "anytron.device.hooks.facade"):
        for dtype in (torch.float32, torch.float32, torch.bfloat16):
            hooks.fused_kernel(KernelName.ROPE, KernelSpec("cpu", dtype))
            hooks.fused_kernel(KernelName.SWIGLU, KernelSpec("cpu", dtype))
    wide, narrow = (f"quick (not quicker: {dtype} is too wide)" for dtype in (torch.float32, torch.bfloat16))
    assert hooks.kernel_descriptions() == {"fused_kernel rope": sorted([wide, narrow])}
    assert caplog.messages == [f"fused_kernel rope: {wide}", f"fused_kernel rope: {narrow}"]
