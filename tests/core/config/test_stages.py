"""A file with stages is as many runs, each of which is whole."""

from __future__ import annotations

import pytest

from anytron.base.errors import ConfigError
from anytron.config.load import load_config, read_config, read_stages
from anytron.config.schema import RunConfig
from anytron.config.stages import StageSection
from anytron.run.preflight.settings import supervised_diagnostics

FILE = """
model: {path: model}
optimizer: {lr: 1.0e-4, schedule: linear}
trainer: {total_steps: 10, seed: 3, output_dir: out/here}
checkpoint: {path: saved}
stages:
  - name: sft
    algorithm: {name: sft}
    data: {source: jsonl, options: {path: answers.jsonl}}
    optimizer: {lr: 1.0e-3}
  - name: grpo
    data: {source: jsonl, options: {path: questions.jsonl}}
    rewards: [{function: exact_match}]
    rollout: {max_new_tokens: 8}
    trainer: {total_steps: 30}
"""


@pytest.fixture
def write(tmp_path):
    def make(text=FILE):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return make


def refused(path, *overrides, reader=read_stages):
    with pytest.raises(ConfigError) as error:
        reader(path, overrides)
    return str(error.value)


def test_each_stage_is_the_file_with_what_the_stage_sets(write, tmp_path):
    stages = read_stages(write())
    assert list(stages) == ["sft", "grpo"]
    first, second = (config for config, _ in stages.values())
    assert first.supervised
    assert not second.supervised
    assert (first.optimizer.lr, first.optimizer.schedule) == (1e-3, "linear")
    assert (second.optimizer.lr, second.optimizer.schedule) == (1e-4, "linear")
    assert [one.trainer.total_steps for one in (first, second)] == [10, 30]
    assert [one.trainer.seed for one in (first, second)] == [3, 3]
    assert [one.trainer.output_dir for one in (first, second)] == ["out/here/1-sft", "out/here/2-grpo"]
    assert [one.checkpoint.path for one in (first, second)] == ["saved/1-sft", "saved/2-grpo"]
    assert first.data.options["path"] == str(tmp_path / "answers.jsonl")
    assert first.model == second.model


def test_a_file_without_stages_is_one_run(write):
    text = (
        FILE.partition("stages:")[0] + "data: {source: jsonl, options: {path: p}}\nrewards: [{function: exact_match}]\n"
    )
    ((config, _),) = read_stages(write(text)).values()
    assert (config.trainer.output_dir, config.checkpoint.path) == ("out/here", "saved")


def test_overrides_reach_all_stages_and_one(write):
    stages = read_stages(write(), ["optimizer.eps=1e-6", "optimizer.lr=7", "stages[1].trainer.total_steps=2"])
    first, second = (config for config, _ in stages.values())
    assert [one.optimizer.eps for one in (first, second)] == [1e-6, 1e-6]
    assert [one.optimizer.lr for one in (first, second)] == [1e-3, 7.0], "what a stage sets wins"
    assert [one.trainer.total_steps for one in (first, second)] == [10, 2]


def test_one_stage_is_read_for_commands_that_look_at_one(write):
    config = load_config(write(), ["stage=grpo", "optimizer.lr=7"])
    assert (config.trainer.total_steps, config.optimizer.lr) == (30, 7.0)


def test_null_removes_a_section_and_a_list_replaces_a_list(write):
    text = FILE.replace(
        "stages:",
        "validation: {sets: [{name: hard, data: {source: jsonl, options: {path: h.jsonl}}}]}\n"
        "rewards: [{function: math}, {function: exact_match}]\nstages:",
    ).replace("algorithm: {name: sft}", "algorithm: {name: sft}\n    validation: null\n    rewards: []")
    first, second = (config for config, _ in read_stages(write(text)).values())
    assert first.validation is None
    assert first.rewards == []
    assert second.validation is not None
    assert [one.function for one in second.rewards] == ["exact_match"]


def test_a_section_is_a_stages_or_the_whole_files():
    """A role that only one stage has (SFT has no teacher) must have its place there."""
    whole = {"model", "executor", "platform", "resume", "tracking"}
    assert StageSection.model_fields.keys() - {"name"} == RunConfig.model_fields.keys() - whole


def test_a_stage_has_a_teacher_of_its_own(write):
    algorithm = "algorithm: {distillation_coefficient: 1.0}"
    text = FILE.replace("rewards:", f"teacher: {{path: big}}\n    {algorithm}\n    rewards:")
    first, second = (config for config, _ in read_stages(write(text)).values())
    assert list(supervised_diagnostics(first)) == []
    assert second.teacher.path.endswith("big")


def test_a_mistake_has_the_place_of_the_stage_or_of_the_file(write):
    path = write(FILE.replace("schedule: linear", "schedule: liner").replace("max_new_tokens: 8", "max_new_token: 8"))
    text = refused(path)
    assert f"optimizer.schedule ({path}:3)" in text
    assert f"rollout.max_new_token ({path}:14)" in text
    assert "did you mean rollout.max_new_tokens?" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("- name: grpo", "- nam: grpo"), "unknown key 'nam' in stages.1"),
        (("- name: grpo", "- name: sft"), "two stages have the same name: sft; give each stage a different name"),
        (("- name: grpo", "- name: ../grpo"), "stages.1.name"),
        (("trainer: {total_steps: 30}", "model: {path: other}"), "unknown key 'model' in stages.1"),
        (("total_steps: 30", "output_dir: other"), "stages.1.trainer.output_dir"),
        (
            ("trainer: {total_steps: 30}", "engine: {name: other}"),
            "this key applies to all stages, but one stage sets it",
        ),
        (("rollout: {max_new_tokens: 8}", "rollout: 8"), "stages.1.rollout"),
        (("stages:\n", "stages: []\nnothing:\n"), "stages"),
        (("stages:\n", "stages: sft\nnothing:\n"), "stages"),
    ],
)
def test_stages_that_are_none_are_refused(write, change, message):
    assert message in refused(write(FILE.replace(*change)))


def test_a_stage_must_be_named_where_one_is_needed(write):
    path = write()
    assert "stage=sft or stage=grpo" in refused(path, reader=load_config)
    assert "did you mean stage=grpo?" in refused(path, "stage=gpro", reader=load_config)
    assert "there is no stage ['grpo']" in refused(path, "stage=[grpo]", reader=load_config)


def test_one_stage_cannot_be_trained_alone(write):
    assert "starts from the weights of the previous stage" in refused(write(), "stage=grpo")


def test_a_stage_of_a_file_without_stages_is_an_unknown_key(write):
    text = (
        FILE.partition("stages:")[0] + "data: {source: jsonl, options: {path: p}}\nrewards: [{function: exact_match}]\n"
    )
    assert "unknown key 'stage'" in refused(write(text), "stage=grpo")


def test_text_that_cannot_be_written_is_refused_before_its_path_is_followed(write):
    assert "NUL" in refused(write(FILE.replace("{path: model}", '{path: "mo\\0del"}')))


def test_what_a_command_sets_wins_over_a_stage_and_over_overrides(write):
    given = {"data": {"source": "csv", "options": {"path": "/other.csv"}}, "rollout.stop": [], "tracking.sinks": []}
    config, places = read_config(write(), ["stage=grpo", "data.prompts_per_step=7"], settings=given)
    assert (config.data.source, config.data.prompts_per_step) == ("csv", 32)
    assert config.rollout.max_new_tokens == 8
    assert places.of("data.options.path") == places.of("rollout.stop") == "set by the command"
    assert "set by the command" not in places.of("rollout.max_new_tokens")
