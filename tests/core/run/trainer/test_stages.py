"""Stages: each begins with what the one before has left, and all of it survives being killed anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from anytron.base.errors import ConfigError, DataError
from anytron.config.schema import RunConfig
from anytron.run.trainer.models import INITIAL_MODEL
from anytron.run.trainer.stages import continued, remaining_stages
from tests.core.run.trainer.disturbed_runs import comparable, lines, raise_at
from tests.core.run.trainer.test_supervised import DATA, EXAMPLES, SFT
from tests.slow import slow_but

CHECKPOINT = {"every_steps": 2, "async": False}


@pytest.fixture
def stages(new_run):
    """The runs of SFT-then-GRPO, by name, as the loop of stages is given them; each made anew."""

    def make(output, sft=3, grpo=3, **shared):
        first = {**SFT, "data": DATA, "trainer": {"total_steps": sft, "output_dir": f"{output}/1-sft"}}
        second = {"trainer": {"total_steps": grpo, "output_dir": f"{output}/2-grpo"}}
        return {
            name: new_run(EXAMPLES, **{"checkpoint": CHECKPOINT, **one, **shared})
            for name, one in (("sft", first), ("grpo", second))
        }

    return make


def train(runs, disturb=None):
    """Train what is left, as the command line does; ``disturb`` is given each run before it starts."""
    told, summaries = [], {}
    for name, config in remaining_stages({name: run.config for name, run in runs.items()}, told.append):
        run = type(runs[name])(config)
        if disturb is not None:
            disturb(name, run)
        summaries[name] = run.train()
    return summaries, told


def left(output):
    """Everything that does not depend on the clock."""
    return {
        name: (
            comparable(Path(output) / name),
            lines(Path(output) / name / "samples.jsonl"),
            {key: one.tolist() for key, one in load_file(Path(output) / name / "hf" / "model.safetensors").items()},
        )
        for name in ("1-sft", "2-grpo")
    }


def test_the_second_stage_begins_with_the_weights_of_the_first(stages, tmp_path):
    runs = stages(tmp_path, sft=40, grpo=1)
    summaries, _ = train(runs)
    assert list(summaries) == ["sft", "grpo"]
    second = json.loads((tmp_path / "2-grpo" / "run.json").read_text())["config"]
    assert second["model"]["path"] == str(tmp_path / "1-sft" / "hf")
    assert not (tmp_path / "2-grpo" / INITIAL_MODEL).exists()
    # With random weights the loss is 2.8, and the reward 0.06.
    assert lines(tmp_path / "1-sft" / "metrics.jsonl")[-1]["loss/nll"] < 1.5
    assert lines(tmp_path / "2-grpo" / "metrics.jsonl")[0]["reward/mean"] > 0.2
    assert lines(tmp_path / "2-grpo" / "metrics.jsonl")[0]["rollout/log_prob_abs_diff"] < 1e-5


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "killed", slow_but(["in the first", "at its end", "between them", "in the second"], "at its end", "in the second")
)
def test_a_run_that_is_killed_anywhere_and_resumed_equals_one_that_was_not(stages, tmp_path, killed, monkeypatch):
    train(stages(tmp_path / "whole"))

    def disturb(name, run):
        if killed == "between them" and name == "grpo":
            raise KeyboardInterrupt
        if killed == "at its end" and name == "sft":
            raise_at(run, 1, method="save_hf")
        if (killed, name) in (("in the first", "sft"), ("in the second", "grpo")):
            raise_at(run, 3)

    with pytest.raises(KeyboardInterrupt):
        train(stages(tmp_path / "run"), disturb)
    summaries, told = train(stages(tmp_path / "run", resume="auto"))
    assert list(summaries)[-1] == "grpo"
    assert ("stage sft has finished" in told) == (killed == "in the second")
    assert left(tmp_path / "run") == left(tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is(stages, tmp_path):
    train(stages(tmp_path))
    before = left(tmp_path)
    summaries, _ = train(stages(tmp_path, resume="auto"))
    assert list(summaries) == ["grpo"]
    assert summaries["grpo"].metrics == {}
    assert left(tmp_path) == before


def test_the_first_stage_is_not_trained_on_under_the_second(stages, tmp_path):
    train(stages(tmp_path))
    with pytest.raises(ConfigError, match=r"(?s)(?i:stage) sft still has to be trained.*total_steps was 3 and is 4"):
        train(stages(tmp_path, sft=4, resume="auto"))
    with pytest.raises(
        ConfigError, match=r"(?s)(?i:stage) sft still has to be trained.*optimizer\.lr was 0\.003 and is 0\.5"
    ):
        train(stages(tmp_path, resume="auto", optimizer={"lr": 0.5}))
    (tmp_path / "1-sft" / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"(?s)does not show that it finished"):
        train(stages(tmp_path, resume="auto"))


def test_an_earlier_run_is_refused_before_the_first_stage_and_deleted_as_a_whole_if_asked(stages, tmp_path):
    train(stages(tmp_path))
    shutil.rmtree(tmp_path / "1-sft")
    started = []
    with pytest.raises(ConfigError, match=r"(?s)holds an earlier run.*2-grpo"):
        train(stages(tmp_path), lambda name, run: started.append(name))
    assert not started

    def overwriting():
        runs = stages(tmp_path)
        for name, run in runs.items():
            trainer = run.config.trainer.model_copy(update={"overwrite": True})
            runs[name] = type(run)(run.config.model_copy(update={"trainer": trainer}))
        return runs

    def stop(name, run):
        raise_at(run, 1)

    with pytest.raises(KeyboardInterrupt):
        train(overwriting(), stop)
    assert not (tmp_path / "2-grpo" / "run.json").exists(), "it would be taken for one that began with these weights"


def test_the_data_of_all_stages_are_read_before_the_first_is_trained(stages, tmp_path):
    runs = stages(tmp_path)
    config = runs["grpo"].config
    data = config.data.model_copy(update={"source": "jsonl", "options": {"path": str(tmp_path / "none.jsonl")}})
    runs["grpo"] = type(runs["grpo"])(config.model_copy(update={"data": data}))
    started = []
    with pytest.raises(DataError, match=r"(?s)where: stage grpo: .*none\.jsonl"):
        train(runs, lambda name, run: started.append(name))
    assert not started


def test_a_checkpoint_is_of_one_run(stages, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)cannot start from a checkpoint.*resume=auto"):
        train(stages(tmp_path, resume=str(tmp_path / "checkpoint")))


def test_adapters_go_on_beside_the_weights_that_never_change(tmp_path):
    data = {"source": "jsonl"}

    def config(model, name):
        trainer = {"output_dir": str(tmp_path / name)}
        rewards = [{"function": "exact_match"}]
        return RunConfig.model_validate({"model": model, "data": data, "rewards": rewards, "trainer": trainer})

    made = {"config": {"model_type": "qwen3"}, "tokenizer": "t", "lora": {"rank": 3}}
    for model, path in ((made, tmp_path / "1" / INITIAL_MODEL), ({"path": "base", "lora": {"rank": 3}}, Path("base"))):
        after = continued(config(model, "2"), config(model, "1")).model
        assert (after.path, after.config) == (str(path), None)
        assert (after.lora.path, after.lora.rank) == (str(tmp_path / "1" / "adapter"), 3)
        RunConfig.model_validate({**config(model, "2").model_dump(), "model": after.model_dump()})  # as a worker does
        third = continued(config(model, "3"), continued(config(model, "2"), config(model, "1"))).model
        assert (third.path, third.lora.path) == (str(path), str(tmp_path / "2" / "adapter"))
