"""What supervised fine-tuning has no use for is refused by name, before anything starts."""

from __future__ import annotations

import pytest

from anytron.config.dump import to_yaml
from anytron.config.schema import RunConfig
from anytron.run.preflight.settings import supervised_diagnostics

DATA = {"source": "jsonl", "options": {"path": "e.jsonl"}}
SFT = {"model": {"path": "model"}, "data": DATA, "algorithm": {"name": "sft"}}
HELD_OUT = {"name": "held", "data": DATA}


def found(**sections):
    values = {**SFT, **sections}
    values["algorithm"] = {**SFT["algorithm"], **sections.get("algorithm", {})}
    return [(one.severity, one.key, one.message) for one in supervised_diagnostics(RunConfig.model_validate(values))]


def test_a_sound_run_passes_without_a_word():
    assert found() == []
    assert found(algorithm={"aggregation": "length-constant", "length_constant": 100}) == []
    assert found(validation={"sets": [HELD_OUT], "every_steps": 3, "keep_best": True, "patience": 2}) == []


def test_the_file_that_a_run_leaves_is_as_sound_as_the_run(tmp_path):
    from anytron.config.load import load_config

    config = RunConfig.model_validate({**SFT, "validation": {"sets": [HELD_OUT]}})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert list(supervised_diagnostics(load_config(tmp_path / "config.yaml"))) == []


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"rewards": [{"function": "exact_match"}]}, "rewards"),
        ({"environment": {"path": "tools.py:Tools"}}, "environment"),
        ({"critic": {}}, "critic"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"rollout": {"engine": "vllm"}}, "rollout.engine"),
        ({"algorithm": {"advantage": "rloo"}}, "algorithm.advantage"),
        ({"algorithm": {"kl_coefficient": 0.1}}, "algorithm.kl_coefficient"),
        ({"algorithm": {"epochs": 2}}, "algorithm.epochs"),
        ({"engine": {"offload": ["optimizer"]}}, "engine.offload"),
        ({"trainer": {"rollout_log_prob_tolerance": 0.1}}, "trainer.rollout_log_prob_tolerance"),
        ({"validation": {"sets": [{**HELD_OUT, "temperature": 0.5}]}}, "validation.sets.0.temperature"),
        (
            {"validation": {"sets": [{**HELD_OUT, "samples_per_prompt": 4}]}},
            "validation.sets.0.samples_per_prompt",
        ),
    ],
)
def test_settings_of_reinforcement_learning_are_refused_by_name(sections, key):
    refused = found(**sections)
    assert ("error", key) in [one[:2] for one in refused]
    assert all(message.startswith("it has no effect with algorithm.name=sft: ") for _, _, message in refused)


def test_the_same_settings_mean_something_with_rewards():
    config = {**SFT, "algorithm": {"kl_coefficient": 0.1}, "rewards": [{"function": "exact_match"}]}
    assert list(supervised_diagnostics(RunConfig.model_validate(config))) == []


def test_the_constant_of_lengths_must_be_said():
    ((_, key, message),) = found(algorithm={"aggregation": "length-constant"})
    assert key == "algorithm.length_constant"
    assert "it has no default" in message
