"""Section validation: what cannot be meant is refused where it stands, and paths are relative to the file."""

from __future__ import annotations

import os

import pytest

from anytron.base.errors import ConfigError
from anytron.config.load import load_config
from anytron.record.checkpoint.differences import is_free
from anytron.run.preflight.files import reference_diagnostics, validation_files, validation_references

RUN = """\
model: {path: model}
data: {source: jsonl, options: {path: train.jsonl}}
rewards: [{function: exact_match}]
validation:
  every_steps: 5
  sets:
    - name: hard
      data: {source: jsonl, options: {path: ../hard.jsonl}}
      rewards: [{function: strict.py:score}]
      samples_per_prompt: 8
      pass_at: [1, 8]
    - name: own.2
      data: {source: own.py:prompts, options: {path: left/alone}}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "config").mkdir()

    def load(*overrides, text=RUN):
        (tmp_path / "config" / "run.yaml").write_text(text)
        return load_config(tmp_path / "config" / "run.yaml", overrides)

    return load


def test_paths_are_relative_to_the_file(load, tmp_path):
    hard, own = load().validation.sets
    here = os.path.realpath(tmp_path)
    assert hard.data.options == {"path": f"{here}/hard.jsonl"}
    assert hard.rewards[0].function == f"{here}/config/strict.py:score"
    assert own.data.source == f"{here}/config/own.py:prompts"
    assert own.data.options == {"path": "left/alone"}
    assert validation_references(load()) == {
        "validation.sets.0.data.source": "jsonl",
        "validation.sets.0.rewards.0.function": f"{here}/config/strict.py:score",
        "validation.sets.1.data.source": f"{here}/config/own.py:prompts",
    }
    assert validation_files(load())["validation.sets.0.data.options.path"] == f"{here}/hard.jsonl"


def test_files_that_do_not_exist_are_found_before_anything_starts(load):
    keys = {one.key for one in reference_diagnostics(load())}
    assert {"validation.sets.0.rewards.0.function", "validation.sets.1.data.source"} <= keys


def test_without_more_the_mean_of_the_first_set_decides(load):
    def criterion(*overrides, supervised=False):
        return load(*overrides).validation.criterion(supervised=supervised)

    assert criterion() == ("validation/hard/mean@8", "max")
    assert criterion("validation.metric=validation/hard/pass@8") == ("validation/hard/pass@8", "max")
    assert criterion("validation.direction=min") == ("validation/hard/mean@8", "min")
    assert criterion(supervised=True) == ("validation/hard/loss", "min")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("validation.sets[0].pass_at=[16]", r"pass_at=\[16\].*from 1 to samples_per_prompt=8.*fewer than k"),
        ("validation.sets[0].pass_at=[0]", r"pass_at=\[0\]"),
        ("validation.sets[0].pass_at=[2, 2]", r"different numbers"),
        ("validation.sets[1].pass_at=[2]", r"samples_per_prompt=1"),
        ("validation.sets[1].name=hard", r"more than once: hard; give each"),
        ("validation.sets[1].name=a/b", r"should match pattern"),
        ("validation.sets[1].name=../up", r"should match pattern"),
        ("validation.sets=[]", r"at least 1 item"),
        ("validation.metric=validation/hard/pass@4", r"unknown metric validation/hard/pass@4.*pass@"),
        ("validation.metric=reward/mean", r"unknown metric reward/mean; known metrics: validation/hard/mean@8"),
        ("validation.metric=validation/hard/loss", r"algorithm.name=rl measures rewards"),
        ("validation.direction=up", r"direction"),
        ("validation.min_delta=.nan", r"min_delta"),
        ("validation.patience=0", r"patience"),
        ("validation.sets[0].temperature=0", r"temperature"),
        ("validation.sets[0].data.shuffle=false", r"takes every prompt in order"),
        ("validation.sets[0].data.prompts_per_step=3", r"takes every prompt in order"),
        ("validation.sets[0].data.pahts=3", r"unknown key 'pahts'"),
        ("validation.sets[1].rewards=[{function: environment}]", r"add a section environment"),
    ],
)
def test_what_cannot_be_meant_is_refused(load, override, why):
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        load(override)


@pytest.mark.parametrize("key", ["keep_best=true", "patience=2"])
def test_validations_that_are_compared_must_be_several(load, key):
    with pytest.raises(ConfigError, match=r"compare several validations.*set every_steps"):
        load("validation.every_steps=null", f"validation.{key}")


def test_the_best_checkpoint_cannot_be_kept_where_none_is_written(load):
    with pytest.raises(ConfigError, match=r"checkpoint\.keep=0"):
        load("validation.keep_best=true", "checkpoint.keep=0")


def test_validation_may_change_when_a_run_is_resumed():
    assert is_free("validation")
    assert is_free("validation.sets.0.samples_per_prompt")


@pytest.mark.parametrize("key", ["rollout.temperature", "validation.sets[0].temperature"])
def test_who_asks_for_a_temperature_of_0_is_told_how_greedy_sampling_is_written(load, key):
    with pytest.raises(ConfigError, match=r"for greedy decoding, set top_k=1"):
        load(f"{key}=0")
    load(key.replace("temperature", "top_k") + "=1")
    with pytest.raises(ConfigError, match="greater than 0"):
        load(f"{key}=-1")
