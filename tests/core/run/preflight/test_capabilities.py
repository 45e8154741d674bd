"""What an engine does not declare is refused by name, before any process starts."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from anytron.base.components import EngineInfo
from anytron.base.errors import ConfigError
from anytron.config.diagnostics import refuse
from anytron.config.document import meanings
from anytron.config.schema import RunConfig
from anytron.device.platform import Decision
from anytron.run.preflight.capabilities import (
    platform_diagnostics,
    rollout_diagnostics,
    saves_checkpoints,
    shows_gradients,
    training_diagnostics,
    verification_diagnostics,
    weight_diagnostics,
)
from anytron.run.preflight.open_run import open_run
from anytron_megatron.options import MEGATRON
from anytron_rollout.options import TRANSFORMERS


def run_of(engine="small", options=None, **sections) -> RunConfig:
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "t", **sections.pop("model", {})}
    values = {
        "model": model,
        "data": {"source": "s"},
        "rewards": [{"function": "f"}],
        "engine": {"name": engine, "options": options or {}},
    }
    values["checkpoint"] = {"keep": 0}
    return RunConfig.model_validate(values | sections)


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("critic", {"algorithm": {"advantage": "gae"}, "critic": {}}),
        ("model.lora", {"model": {"lora": {}}}),
        ("teacher", {"algorithm": {"distillation_coefficient": 1.0}, "teacher": {"path": "t"}}),
    ],
)
def test_an_engine_that_lacks_what_the_run_needs_is_refused_by_name(testchip, key, sections):
    (found,) = training_diagnostics(run_of(**sections))
    assert (found.severity, found.key) == ("error", key)
    assert found.message.startswith(
        f"the engine small cannot {'score with a teacher' if key == 'teacher' else 'train'}"
    )
    assert list(training_diagnostics(run_of("megatron", **sections))) == []
    assert "testchip_engine" not in sys.modules


def test_an_engine_that_holds_no_reward_model_is_refused_if_there_is_one(testchip):
    judged = {"rewards": [{"function": "reward_model"}], "reward_model": {"path": "m"}}
    assert list(training_diagnostics(run_of(**judged))) == []
    (found,) = training_diagnostics(run_of("slow", **judged))
    assert (found.severity, found.key) == ("error", "reward_model")
    assert "the engine slow cannot score with a reward model" in found.message
    assert list(training_diagnostics(run_of("megatron", **judged))) == []


def test_an_engine_whose_weights_cannot_be_compared_is_refused_if_they_are_to_be(testchip):
    (found,) = weight_diagnostics(run_of(rollout={"engine": "small", "check_weights_every": 3}))
    assert (found.severity, found.key) == ("error", "rollout.check_weights_every")
    for rollout in ({"engine": "small"}, {"check_weights_every": 3}):
        assert list(weight_diagnostics(run_of(rollout=rollout))) == []


def test_engines_that_cannot_leave_their_devices_are_refused_if_they_are_to(testchip):
    def found(engine, rollout):
        run = run_of(engine, rollout={"engine": rollout, "sleep": True})
        run = run.model_copy(update={"engine": run.engine.model_copy(update={"offload": ["optimizer"]})})
        return [(one.severity, one.key) for one in training_diagnostics(run)]

    assert found("small", "small") == [("error", "engine.offload"), ("error", "rollout.sleep")]
    assert found("megatron", "transformers") == []


def test_adapters_are_sent_alone_only_to_engines_that_compute_with_them_and_if_there_are_any(testchip):
    def found(lora={}, **rollout):  # noqa: B006 - never changed
        run = run_of("megatron", model={"lora": lora}, rollout={"engine": "vllm", "lora": "alone", **rollout})
        return [(one.severity, one.key, one.message.partition(":")[0]) for one in training_diagnostics(run)]

    error = "error", "rollout.lora"
    assert found() == []
    assert found(engine="small") == [(*error, "the engine small cannot generate with adapters")]
    assert found(engine="transformers") == [(*error, "the engine transformers cannot generate with adapters")]
    assert found(lora=None) == [(*error, "there are no adapters to send")]
    message = "it needs all weights, and rollout.lora=alone sends adapters only"
    assert ("error", "rollout.check_weights_every", message) in found(check_weights_every=3)
    assert ("error", "rollout.sleep", message) in found(sleep=True)


def test_routing_is_told_by_one_engine_and_repeated_by_the_other(testchip):
    def found(engine, rollout):
        run = run_of(engine, rollout={"engine": rollout, "replay_routing": True})
        return [(one.severity, one.key, one.message.partition(":")[0]) for one in training_diagnostics(run)]

    error = "error", "rollout.replay_routing"
    assert found("megatron", "small") == [(*error, "the engine small cannot report its routing")]
    assert found("small", "transformers") == [(*error, "the engine small cannot replay the rollout's routing")]
    assert found("megatron", "transformers") == []


def test_weights_are_rounded_by_engines_that_can_and_what_rounding_would_break_is_refused(testchip):
    def found(rollout="transformers", tolerance=None, adapters=None, **more):
        sections = {"rollout": {"engine": rollout, "quantization": "fp8", **more}, "model": {"lora": adapters}}
        run = run_of("megatron", **sections, trainer={"rollout_log_prob_tolerance": tolerance})
        return [(one.severity, one.key, f"{one.message} - {one.fix}") for one in training_diagnostics(run)]

    assert found() == found("vllm") == found(tolerance=0.1) == []
    for engine in ("small", "megatron"):
        ((severity, key, text),) = found(engine)
        assert (severity, key) == ("error", "rollout.quantization")
        assert f"the engine {engine} cannot round its weights" in text
    ((severity, key, text),) = found("vllm", adapters={}, lora="alone")
    assert (severity, key) == ("error", "rollout.quantization")
    assert "rollout.lora=merged" in text
    ((severity, key, text),) = found(check_weights_every=2)
    assert (severity, key) == ("error", "rollout.check_weights_every")
    assert "bit for bit" in text
    ((severity, key, text),) = found(tolerance=1e-3)
    assert (severity, key) == ("error", "trainer.rollout_log_prob_tolerance")
    assert "0.001 is less than what rollout.quantization changes" in text


def test_a_run_that_needs_nothing_of_the_kind_is_not_remarked_on(testchip):
    assert list(training_diagnostics(run_of())) == []


def test_a_run_is_not_resumed_by_an_engine_that_cannot_and_saving_nothing_is_remarked_on(testchip):
    (found,) = training_diagnostics(run_of(resume="auto"))
    assert (found.severity, found.key) == ("error", "resume")
    (found,) = training_diagnostics(run_of(checkpoint={}))
    assert (found.severity, found.key) == ("warning", "checkpoint")
    assert found.message.startswith("the engine small cannot save checkpoints")
    assert list(training_diagnostics(run_of("megatron", checkpoint={}, resume="auto"))) == []
    assert not saves_checkpoints(run_of(checkpoint={}))
    assert saves_checkpoints(run_of("megatron", checkpoint={}))
    assert not saves_checkpoints(run_of("megatron"))


def test_a_number_format_that_the_platforms_modules_lack_is_refused_before_a_process_starts():
    def found(portable, **transformer):
        run = run_of(engine="megatron", options={"transformer": transformer})
        platform = SimpleNamespace(name="chip", portable_modules=portable, decisions=list)
        return [(one.severity, one.key) for one in platform_diagnostics(run, platform)]

    assert found(portable=True, fp8="hybrid") == [("error", "engine.options.transformer.fp8")]
    assert found(portable=True, fp4="e2m1") == [("error", "engine.options.transformer.fp4")]
    for portable in (True, False):
        assert found(portable, batch_invariant_mode=True) == [
            ("error", "engine.options.transformer.batch_invariant_mode")
        ]
    assert found(portable=True, fp8=None, batch_invariant_mode=False) == []
    assert found(portable=False, fp8="hybrid") == []  # the device is asked by Transformer Engine, in the training ranks


def test_why_the_modules_are_portable_is_said_with_the_number_format_that_they_lack():
    decisions = [Decision("modules", "portable", "the vendor's are not installed"), Decision("tile", "8", "always")]
    platform = SimpleNamespace(name="chip", portable_modules=True, decisions=lambda: decisions)
    (found,) = platform_diagnostics(run_of(engine="megatron", options={"transformer": {"fp8": "hybrid"}}), platform)
    assert "portable Transformer Engine (the vendor's are not installed), which supports neither FP8" in found.message


@pytest.mark.parametrize(
    ("saving", "transformer", "remarks"),
    [
        ({"checkpoint": {}}, {"fp8": "hybrid"}, 1),
        ({"resume": "auto"}, {"fp8": "hybrid", "fp8_recipe": "delayed"}, 1),
        ({}, {"fp8": "hybrid"}, 0),
        ({"checkpoint": {}}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 0),
        ({"checkpoint": {}}, {}, 0),
    ],
)
def test_scales_that_no_checkpoint_holds_are_remarked_on(saving, transformer, remarks):
    run = run_of("megatron", {"transformer": transformer}, **saving)
    found = list(platform_diagnostics(run, SimpleNamespace(name="chip", portable_modules=False)))
    assert [(one.severity, one.key) for one in found] == [
        ("warning", "engine.options.transformer.fp8_recipe")
    ] * remarks


def test_an_engine_that_says_nothing_of_platforms_is_not_asked(testchip):
    assert list(platform_diagnostics(run_of(), SimpleNamespace(portable_modules=True))) == []


def test_verification_needs_engines_that_can_be_observed(testchip):
    (found,) = verification_diagnostics(run_of())
    assert (found.key, "cannot return its logits" in found.message) == ("engine.name", True)
    assert list(verification_diagnostics(run_of("megatron"))) == []
    (found,) = verification_diagnostics(run_of("megatron", rollout={"engine": "megatron"}))
    assert (found.key, "rollout.engine=transformers" in found.fix) == ("rollout.engine", True)


def test_an_engine_says_whether_it_shows_gradients(testchip):
    assert shows_gradients(run_of("megatron"))
    assert not shows_gradients(run_of())


def test_it_is_found_with_all_other_mistakes_and_its_place(testchip, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model:\n  config: {model_type: qwen3}\n  tokenizer: t\n  lora: {}\ndata: {source: s}\n"
        "rewards: [{function: f}]\nengine: {name: small}\nplatform: {name: testchip}\n"
    )
    with pytest.raises(ConfigError, match=rf"model\.lora \({file}:4\): the engine small cannot train adapters"):
        refuse(open_run(file, []).diagnostics)


def test_an_entry_point_that_names_no_description_says_what_to_do(site_with_old_entry_point):
    with pytest.raises(
        ConfigError, match=r"(?s)refer to an EngineInfo.*not an anytron.base.components.EngineInfo.*reinstall"
    ):
        list(training_diagnostics(run_of("old", critic={}, algorithm={"advantage": "gae"})))


@pytest.fixture
def site_with_old_entry_point(tmp_path, monkeypatch) -> Path:
    metadata = tmp_path / "old-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[anytron.training_engines]\nold = pathlib:Path\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("info", [MEGATRON, TRANSFORMERS], ids=["megatron", "transformers"])
def test_descriptions_are_light_and_complete(info: EngineInfo):
    assert info.options_model is not None
    assert info.options_model.model_config["extra"] == "forbid"
    assert meanings(info.options_model).keys() == info.options_model.model_fields.keys()


def test_training_ranks_that_generate_have_no_rollout_process_to_configure():
    def found(**rollout):
        return [(one.severity, one.key) for one in rollout_diagnostics(run_of("megatron", rollout=rollout))]

    assert found(engine="megatron") == []
    asked = {
        "replicas": 2,
        "num_threads": 1,
        "python": "p",
        "weights": "file",
        "placement": "separate",
        "max_staleness": 1,
    }
    assert found(**asked) == []
    assert found(engine="megatron", **asked) == [("error", f"rollout.{name}") for name in asked]


def test_a_part_of_an_engine_does_not_generate_for_another_one(testchip):
    (found,) = rollout_diagnostics(run_of("small", rollout={"engine": "megatron"}))
    assert (found.severity, found.key) == ("error", "rollout.engine")
    assert found.message == (
        "the rollout engine megatron is a part of the training engine megatron, but engine.name is small"
    )


def test_generation_on_training_ranks_is_refused_where_attention_is_the_vendors():
    def found(portable):
        run = run_of("megatron", rollout={"engine": "megatron"})
        platform = SimpleNamespace(name="chip", portable_modules=portable)
        return [(one.severity, one.key) for one in platform_diagnostics(run, platform)]

    assert found(portable=True) == []
    assert found(portable=False) == [("error", "rollout.engine")]
