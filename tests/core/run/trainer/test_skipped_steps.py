"""Steps without a token to train on: skipped and counted, alike after a resume, and ended by too many in a row."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from anytron.base.errors import ConfigError, DataError
from anytron.run.trainer.experience import _without_signal
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, assert_equal, comparable, lines, output, raise_at, steps
from tests.core.run.trainer.torch_engines import TorchEngine

CUT = {"rollout": {"samples_per_prompt": 4, "max_new_tokens": 3, "min_new_tokens": 3}, "data": {"prompts_per_step": 2}}
"""Every response is as long as it may be, and so ends at the limit."""
MASKING = {"overlong_masking": True}
TASK = {"source": "task.py:prompts", "options": {"count": 64, "digits": 3}, "prompts_per_step": 2}

SOMETIMES = """
def sometimes(samples):
    # Prompts are drawn in turn: those of odd numbers have signal.
    return [float(index % 2 * (int(one.prompt_id.split("-")[1]) % 2)) for index, one in enumerate(samples)]
"""
ONE_IN_TWO = {
    "rewards": [{"function": "task.py:sometimes"}],
    "rollout": {"samples_per_prompt": 4},
    "data": {**TASK, "prompts_per_step": 1, "shuffle": False},
    "algorithm": {"dynamic_sampling": True, "dynamic_sampling_rounds": 1, "max_steps_without_signal": 2},
}


@pytest.fixture
def updates(monkeypatch):
    """Count the updates of the policy and of the critic."""
    counts = {"update": 0, "update_critic": 0}

    def count(name, real):
        def counting(engine, micro_batches, loss):
            counts[name] += 1
            return real(engine, micro_batches, loss)

        monkeypatch.setattr(TorchEngine, name, counting)

    for name in counts:
        count(name, getattr(TorchEngine, name))
    return counts


def test_a_step_without_signal_is_skipped_and_the_run_goes_on(new_run, updates):
    run = new_run(SOMETIMES, **ONE_IN_TWO, trainer={"total_steps": 4})
    assert run.train().steps == 4
    skipped = [step["update/skipped"] for step in run.progress.steps]
    assert skipped in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert [step["reward/steps_without_signal"] for step in run.progress.steps] == skipped
    assert [step["reward/groups_without_signal"] for step in run.progress.steps] == skipped
    assert updates["update"] == 2
    for step in run.progress.steps:
        assert ("grad_norm" in step) == ("loss/total" in step) == (not step["update/skipped"])
        assert step.keys() >= {"reward/mean", "response/length_mean", "time/step_s", "throughput/tokens_per_s"}
    warning = run.progress.warnings[0]
    assert "nothing to train on, and the step is skipped: 1 in a row so far, and the run ends after 2" in warning


def test_a_run_that_is_killed_after_a_skipped_step_goes_on_to_the_digit(new_run, tmp_path):
    algorithm = {**ONE_IN_TWO["algorithm"], "kl_coefficient": 0.1, "kl_target": 0.01}
    sections = {**ONE_IN_TWO, "algorithm": algorithm, "checkpoint": {**EVERY_STEP, "async": False}}
    whole = tmp_path / "whole"
    new_run(SOMETIMES, **sections, trainer={"total_steps": 4, "output_dir": str(whole)}).train()
    records = lines(whole / "metrics.jsonl")
    assert 1 in [one["update/skipped"] for one in records[:2]]
    for before, after in pairwise(records):
        same = before["kl/coefficient"] == after["kl/coefficient"]
        assert same == bool(before["update/skipped"]), "a skipped step has no divergence to follow"
    assert records[-1]["kl/coefficient"] != 0.1
    trainer = {"total_steps": 4, "output_dir": str(output(new_run))}
    killed = new_run(SOMETIMES, **sections, trainer=trainer)
    raise_at(killed, 3, method="poll")
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert steps(output(new_run))[-1] == 2
    new_run(SOMETIMES, **sections, trainer=trainer, resume="auto").train()
    model = load_file(whole / "hf" / "model.safetensors")
    assert_equal(output(new_run), (comparable(whole), lines(whole / "samples.jsonl"), model))


def test_too_many_in_a_row_end_the_run_and_count_on_after_a_resume(new_run, updates):
    algorithm = {**MASKING, "max_steps_without_signal": 3}
    trainer = {"total_steps": 9, "output_dir": str(output(new_run))}
    with pytest.raises(DataError, match="3 steps in a row had nothing to train on") as raised:
        new_run(**CUT, algorithm=algorithm, trainer=trainer).train()
    assert raised.value.where == "step 3"
    assert "of 8 responses in the last step 8 were truncated and masked" in raised.value.why
    assert steps(output(new_run)) == [2], "nothing is lost"
    assert updates["update"] == 0
    assert [line["step"] for line in lines(output(new_run) / "metrics.jsonl")] == [1, 2]
    with pytest.raises(DataError, match="3 steps in a row") as again:
        new_run(**CUT, algorithm=algorithm, trainer=trainer, resume="auto").train()
    assert again.value.where == "step 3", "it is the same run"


SAME = """
def same(samples):
    return [0.5 + (len(samples) > 8) * (index % 2) for index, _ in enumerate(samples)]
"""
SAMPLING = {"dynamic_sampling": True, "dynamic_sampling_rounds": 1}


@pytest.mark.parametrize(
    ("algorithm", "remedy"),
    [
        pytest.param(MASKING, {"algorithm.overlong_masking": False}, id="masking-off", marks=pytest.mark.slow),
        pytest.param(MASKING, {"algorithm.max_steps_without_signal": 20}, id="more-steps", marks=pytest.mark.slow),
        pytest.param(MASKING, {"rollout.max_new_tokens": 12}, id="longer-responses"),
        pytest.param(SAMPLING, {"algorithm.dynamic_sampling": False}, id="sampling-off", marks=pytest.mark.slow),
        pytest.param(
            SAMPLING,
            {"algorithm.dynamic_sampling_rounds": 2, "rollout.samples_per_prompt": 6},
            id="more-samples-and-rounds",
        ),
    ],
)
def test_with_each_remedy_of_its_error_the_next_command_goes_on(new_run, algorithm, remedy):
    """The checkpoint is that of the second step, the run ends in the third."""
    data = {**TASK, "prompts_per_step": 2}
    sections = {
        "algorithm": {**algorithm, "max_steps_without_signal": 3},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 1, "min_new_tokens": 1},
    }
    fixed = {"data": data, "rewards": [{"function": "task.py:same"}], "trainer": {"total_steps": 4}}
    with pytest.raises(DataError) as raised:
        new_run(SAME, **fixed, **sections).train()
    for key, value in remedy.items():
        assert key in raised.value.fix
        section, name = key.split(".")
        sections[section] = {**sections[section], name: value}
    assert new_run(SAME, **fixed, **sections, resume="auto").train().steps == 4
    (resume,) = json.loads((output(new_run) / "run.json").read_text())["resumes"]
    assert resume["step"] == 2
    assert {change["key"]: change["new"] for change in resume["changes"] if change["key"] != "resume"} == remedy


def test_a_key_that_no_remedy_names_is_refused_as_before(new_run):
    new_run(trainer={"total_steps": 1}).train()
    with pytest.raises(ConfigError, match="differs from the one of the run") as raised:
        new_run(trainer={"total_steps": 2}, resume="auto", rollout={"temperature": 0.5}).train()
    assert raised.value.where == "rollout.temperature"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [({}, 2), ({"advantage": "reinforce_plus_plus"}, 1)],
    ids=["compared", "each-by-itself"],
)
def test_groups_without_signal_are_counted(new_run, algorithm, expected):
    nan = torch.nan
    rewards = torch.tensor([1.0, 1.0, nan, nan, 0.0, 1.0, 0.0, nan, 1.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2])
    assert _without_signal(rewards, groups, new_run(algorithm=algorithm).config) == expected
