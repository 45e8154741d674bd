"""Runs with an environment: the loop, real environment and reward processes, a plain training engine."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from anytron.base.errors import ConfigError
from anytron.run.rollout import conversations
from tests.core.run.trainer.conftest import CALCULATOR, EXAMPLES
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, assert_equal, comparable, lines, raise_at


def test_turns_and_tool_calls_are_measured_and_log_probs_agree_over_the_models_own_tokens(new_calculator):
    run = new_calculator(trainer={"total_steps": 3, "log_samples": 64})
    summary = run.train()
    for metrics in run.progress.steps:
        assert metrics["rollout/log_prob_abs_diff"] <= 1e-5
        assert metrics["environment/failed"] == 0
        assert metrics["environment/turns_max"] == 2
        assert 1 < metrics["environment/turns_mean"] < 2
        assert metrics["environment/metrics/tool_calls"] > 0
        assert 0 < metrics["environment/observation_tokens_mean"] < 8
        assert metrics["response/length_max"] <= 12
        assert metrics["grad_norm"] > 0
    records = lines(summary.output_dir / "samples.jsonl")
    assert len(records) == 3 * 64
    for record in records:
        assert len(record["response_mask"]) == len(record["response_tokens"])
        assert record["reward"] == pytest.approx(record["environment_reward"])
    asked = [record for record in records if len(record["turns"]) == 2]
    assert asked
    for record in asked:
        hole = [token for token, own in zip(record["response_tokens"], record["response_mask"], strict=True) if not own]
        assert record["turns"][0].endswith("*")
        assert hole[-1] == 12  # what the calculator's display ends with: `;`


def test_environments_that_fail_cost_their_samples_and_not_the_run(new_calculator, tmp_path):
    code = (EXAMPLES / "calculator.py").read_text() + (
        "\n\nclass Fragile(Calculator):\n    def step(self, turn):\n"
        "        if turn.text.startswith('3'):\n            import os; os._exit(3)\n"
        "        return super().step(turn)\n"
    )
    (tmp_path / "fragile.py").write_text(code)
    run = new_calculator(
        environment={"path": f"{tmp_path}/fragile.py:Fragile"},
        algorithm=CALCULATOR["algorithm"],
        trainer={"total_steps": 2},
    )
    summary = run.train()
    for metrics in run.progress.steps:
        assert 0 < metrics["environment/failed"] < 64
        assert metrics["rollout/log_prob_abs_diff"] <= 1e-5
        assert metrics["grad_norm"] > 0
    failed = [record for record in lines(summary.output_dir / "samples.jsonl") if "environment_error" in record]
    assert failed
    assert all("status 3" in record["environment_error"] and record["reward"] is None for record in failed)
    assert all(record["turns"][-1].startswith("3") for record in failed)


@pytest.mark.slow
def test_an_environment_that_fails_for_all_of_a_later_round_costs_that_round(new_calculator, tmp_path):
    code = (EXAMPLES / "calculator.py").read_text() + (
        "\n\nclass Choosy(Calculator):\n    def reset(self, task):\n"
        "        self.hopeless = task.prompt_text[0] in '345'\n        super().reset(task)\n"
        "    def step(self, turn):\n        assert not self.hopeless\n        return super().step(turn)\n"
    )
    (tmp_path / "choosy.py").write_text(code)
    run = new_calculator(
        environment={"path": f"{tmp_path}/choosy.py:Choosy"},
        algorithm={**CALCULATOR["algorithm"], "dynamic_sampling": True, "dynamic_sampling_rounds": 30},
        trainer={"total_steps": 3, "log_samples": 10**6},
    )
    summary = run.train()
    records, hopeless = lines(summary.output_dir / "samples.jsonl"), 0
    for step, metrics in enumerate(run.progress.steps, start=1):
        own = [record for record in records if record["step"] == step]
        groups = [[record["reward"] for record in own[start : start + 8]] for start in range(0, len(own), 8)]
        assert metrics["environment/failed"] == sum(group.count(None) for group in groups) > 0
        missing = 8
        while missing:
            of_round, groups = groups[:missing], groups[missing:]
            hopeless += all(reward is None for group in of_round for reward in group)
            missing -= sum(len(set(group) - {None}) > 1 for group in of_round)
        assert groups == []
    assert hopeless > 0


def test_a_run_that_is_killed_and_resumed_equals_one_that_was_not(new_calculator, tmp_path, monkeypatch):
    """Environments are in no checkpoint: none lives longer than a step."""
    monkeypatch.setattr(conversations, "GATHER_S", 60.0)  # batches of one shape, whatever the machine does besides
    whole, path = tmp_path / "whole", tmp_path / "run"
    new_calculator(trainer={"total_steps": 3, "output_dir": str(whole)}).train()
    killed = new_calculator(trainer={"total_steps": 3, "output_dir": str(path)}, checkpoint=EVERY_STEP)
    raise_at(killed, 3)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    new_calculator(trainer={"total_steps": 3, "output_dir": str(path)}, resume="auto").train()
    model = load_file(whole / "hf" / "model.safetensors")
    assert_equal(path, (comparable(whole), lines(whole / "samples.jsonl"), model))


def test_one_step_ahead_observations_have_no_age_and_are_not_corrected(new_calculator):
    ahead = {**CALCULATOR["rollout"], "samples_per_prompt": 8, "max_staleness": 1}
    run = new_calculator(rollout=ahead, trainer={"total_steps": 3, "log_samples": 64})
    summary = run.train()
    steps = run.progress.steps
    assert [(metrics["rollout/age_mean"], metrics["rollout/age_max"]) for metrics in steps] == [(0, 0), (1, 1), (1, 1)]
    assert steps[0]["rollout/log_prob_abs_diff"] <= 1e-5
    assert steps[0]["rollout/importance_mean"] == pytest.approx(1.0, abs=1e-5)
    assert min(metrics["rollout/kl"] for metrics in steps[1:]) > 0.0
    assert all(metrics["environment/failed"] == 0 for metrics in steps)
    records = lines(summary.output_dir / "samples.jsonl")
    assert all(any(len(record["turns"]) == 2 for record in records if record["step"] == step) for step in (1, 2, 3))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"environment": {"path": "nowhere.py:Calculator"}}, "nowhere.py"),
        ({"environment": {"options": {"digits": 3}}}, "does not accept the arguments that it is called with"),
    ],
)
def test_what_cannot_be_an_environment_is_found_before_anything_starts(new_calculator, sections, message):
    run = new_calculator(**sections)
    with pytest.raises(ConfigError, match=message):
        run.train()
    assert run.executor.started == []
