"""A run whose numbers are suspicious goes on and says so; one whose numbers are merely special says nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anytron.config.load import load_config
from anytron.config.schema import default_run
from anytron.run.trainer.alarms import Alarms, policy_has_to_learn
from anytron.sequences.batch import RaggedBatch
from tests.core.run.trainer.conftest import RecordedProgress
from tests.core.run.trainer.torch_engines import TorchEngine

SAME = "def same(samples):\n    return [0.3] * len(samples)\n"
EQUAL_REWARDS = {"rewards": [{"function": "task.py:same"}]}
PPO = {"algorithm": {"advantage": "gae"}, "critic": {"optimizer": {"lr": 3e-3}}}


@pytest.fixture
def broken(monkeypatch):
    """Break the training engine: its log-probs go through a function, or its critic's values do."""

    def install(*, log_probs=None, values=None):
        forward, value = TorchEngine.forward, TorchEngine.value

        def changed_forward(engine, batch, role):
            found, entropy = forward(engine, batch, role)
            return log_probs(found), entropy

        if log_probs is not None:
            monkeypatch.setattr(TorchEngine, "forward", changed_forward)
        if values is not None:
            monkeypatch.setattr(TorchEngine, "value", lambda engine, batch: values(value(engine, batch)))

    return install


def without_gradient(values):
    return values.detach() + 0.0 * values


def off_by_a_temperature(log_probs):
    return 1.1 * log_probs


def test_a_run_whose_engines_agree_says_nothing(new_run):
    run = new_run(algorithm={"epochs": 2, "mini_batches": 2}, trainer={"total_steps": 3})
    run.train()
    assert run.progress.warnings == []
    assert not (Path(run.config.trainer.output_dir) / "logs" / "driver.log").exists()


def test_engines_that_disagree_are_told_once_with_the_command_that_says_where(new_run, broken):
    broken(log_probs=off_by_a_temperature)
    run = new_run(trainer={"total_steps": 3})
    run.train()
    directory = Path(run.config.trainer.output_dir)
    first, last = run.progress.warnings
    difference = f"{run.progress.steps[0]['rollout/log_prob_abs_diff']:.3g}"
    assert first.startswith(f"step 1: rollout/log_prob_abs_diff is {difference}: above 0.1 generation and training")
    assert first.endswith(f"anytron verify {directory / 'config.yaml'}")
    assert "algorithm.importance_correction=measured adds" in first
    assert load_config(directory / "config.yaml").trainer.total_steps == 3, "the command has a file to read"
    assert last.startswith("rollout/log_prob_abs_diff was above 0.1 in 3 of 3 steps.")
    log = (directory / "logs" / "driver.log").read_text().splitlines()
    assert [line.partition(" warning: ")[2] for line in log] == [first, last]


def test_numbers_that_a_run_has_are_not_advised(new_run, broken):
    broken(log_probs=off_by_a_temperature)
    run = new_run(algorithm={"importance_correction": "measured"})
    run.train()
    assert run.progress.steps[0].keys() >= {
        "rollout/log_prob_abs_diff_max",
        "rollout/kl",
        "rollout/log_prob_correlation",
        "rollout/effective_sample_size",
    }
    assert "generation and training disagree" in run.progress.warnings[0]
    assert "importance_correction" not in run.progress.warnings[0]


def test_who_has_set_a_tolerance_has_said_what_is_too_much(new_run, broken):
    broken(log_probs=off_by_a_temperature)
    run = new_run(trainer={"rollout_log_prob_tolerance": 0.5})
    run.train()
    assert run.progress.warnings == []


def test_older_weights_differ_by_right_and_the_newest_are_compared_all_the_same(new_run, broken, tmp_path):
    ahead = {"rollout": {"max_staleness": 1}, "optimizer": {"lr": 3e-2}}
    right = new_run(trainer={"total_steps": 4, "output_dir": str(tmp_path / "right")}, **ahead)
    right.train()
    assert max(step["rollout/log_prob_abs_diff"] for step in right.progress.steps) > 0.1, "or this shows nothing"
    assert right.progress.warnings == []

    broken(log_probs=off_by_a_temperature)
    wrong = new_run(trainer={"total_steps": 4, "output_dir": str(tmp_path / "wrong")}, **ahead)
    wrong.train()
    (warning,) = wrong.progress.warnings
    assert warning.startswith("step 1: rollout/log_prob_abs_diff")


def test_a_policy_without_gradient_is_told(new_run, broken):
    broken(log_probs=without_gradient)
    run = new_run(algorithm={"mini_batches": 2})
    run.train()
    first, last = run.progress.warnings
    assert first.startswith("step 1: grad_norm is 0, although there are tokens to learn from")
    assert "anytron verify" in first
    assert last.startswith("grad_norm was 0 in 2 of 2 steps.")


def test_equal_rewards_are_a_reason_for_a_gradient_of_zero(new_run):
    run = new_run(SAME, **EQUAL_REWARDS)
    run.train()
    assert [metrics["grad_norm"] for metrics in run.progress.steps] == [0, 0]
    assert run.progress.warnings == []


def test_so_is_a_penalty_that_holds_the_policy_to_what_it_is(new_run):
    run = new_run(SAME, algorithm={"kl_coefficient": 0.1}, **EQUAL_REWARDS)
    run.train()
    assert [metrics["grad_norm"] for metrics in run.progress.steps] == [0, 0]
    assert run.progress.warnings == []


def test_with_an_entropy_bonus_equal_rewards_are_none(new_run, monkeypatch):
    forward = TorchEngine.forward
    monkeypatch.setattr(TorchEngine, "forward", lambda *given: tuple(map(without_gradient, forward(*given))))
    run = new_run(SAME, algorithm={"entropy_coefficient": 0.1}, **EQUAL_REWARDS)
    run.train()
    assert run.progress.warnings[0].startswith("step 1: grad_norm is 0")


def test_a_critic_without_gradient_is_told(new_run, broken):
    broken(values=without_gradient)
    run = new_run(trainer={"total_steps": 3}, **{**PPO, "critic": {**PPO["critic"], "warmup_steps": 2}})
    run.train()
    first, last = run.progress.warnings
    assert first.startswith("step 1: critic/grad_norm is 0, although values differ from returns")
    assert last.startswith("critic/grad_norm was 0 in 3 of 3 steps.")


def test_a_critic_that_is_right_already_has_nothing_to_learn(new_run):
    run = new_run("def same(samples):\n    return [0.0] * len(samples)\n", **EQUAL_REWARDS, **PPO)
    run.train()
    assert [metrics["critic/grad_norm"] for metrics in run.progress.steps] == [0, 0], "values begin at 0"
    assert run.progress.warnings == []


def test_a_long_run_is_told_again_every_hundred_steps_and_at_its_end(new_run, tmp_path):
    progress, logged = RecordedProgress(), []
    directory = SimpleNamespace(path=tmp_path / "a run", log=logged.append)
    with Alarms(new_run().config, directory, progress) as alarms:
        for step in range(1, 251):
            alarms.stepped({"step": step, "rollout/log_prob_abs_diff": 0.0 if step == 7 else 0.2})
    assert [text.partition(":")[0] for text in progress.warnings[:-1]] == ["step 1", "step 101", "step 201"]
    assert "(100 steps so far)" in progress.warnings[1]
    assert progress.warnings[-1].startswith("rollout/log_prob_abs_diff was above 0.1 in 249 of 250 steps")
    assert progress.warnings[-1].endswith(f"anytron verify '{tmp_path}/a run/config.yaml'"), "for a shell"
    assert logged == [f"warning: {text}" for text in progress.warnings]


@pytest.mark.parametrize(
    ("advantages", "metrics", "expected"),
    [
        ([0, 1, -1, 0], {}, True),
        ([0, 1, -1, 0], {"policy/clip_fraction": 0.25}, True),
        ([0, 1, -1, 0], {"policy/clip_fraction": 0.5000001}, False),
        ([5, 0, 0, 0], {}, False),
        ([0, 0, 0, 0], {"loss/kl": 1e-9}, True),
    ],
    ids=["advantages", "some-clipped", "all-clipped", "of-the-prompt", "penalty"],
)
def test_what_has_a_gradient(new_run, advantages, metrics, expected):
    batch = RaggedBatch(
        torch.tensor([4]),
        torch.arange(4),
        torch.arange(4) > 0,
        advantages=torch.tensor(advantages, dtype=torch.float32),
        token_shares=torch.tensor([0.0, 0.25, 0.25, 0.5]),
    )
    assert policy_has_to_learn(batch, metrics, new_run().config) is expected


def test_a_supervised_update_without_a_gradient_is_suspicious():
    """It has no advantages that could be 0: there is always something to learn."""
    batch = RaggedBatch(torch.tensor([3]), torch.tensor([1, 2, 3]), torch.tensor([False, True, True]))
    config = load_config(Path(__file__).parents[4] / "examples" / "sft_then_grpo_sort.yaml", ["stage=sft"])
    assert policy_has_to_learn(batch, {"loss/total": 2.0}, config)


def steps(alarms, rewards, without):
    for step, (reward, groups) in enumerate(zip(rewards, without, strict=True), 1):
        alarms.stepped({"step": step, "reward/mean": reward, "reward/groups_without_signal": groups})


@pytest.mark.parametrize(
    ("rewards", "without", "told"),
    [
        ([0.2] * 60, [8] * 20 + [8, 7] * 20, 1),  # two digits for SmolLM2: 0.2 for any number, and none is right
        ([0.0] * 60, [8] * 60, 1),
        ([0.2] * 60, [8, 5] * 30, 0),  # groups still differ
        ([0.2] * 20 + [0.9] * 40, [8] * 60, 0),  # it has learnt
        ([0.2] * 39, [8] * 39, 0),
        ([-1.0] * 20 + [-1.05] * 40, [8] * 60, 1),
        ([-1.0] * 20 + [-0.5] * 40, [8] * 60, 0),
    ],
)
def test_a_reward_that_does_not_rise_where_groups_are_equal_is_told(rewards, without, told, tmp_path):
    progress, logged = RecordedProgress(), []
    run = SimpleNamespace(path=tmp_path, log=logged.append)
    with Alarms(default_run({"data": {"source": "jsonl", "prompts_per_step": 8}}), run, progress) as alarms:
        steps(alarms, rewards, without)
        warned = list(progress.warnings)
    assert len(warned) == told
    if told:
        assert warned[0].startswith("step 40: in the last 20 steps ")
        assert f"{rewards[0]:.3g} in the first 20 steps, {rewards[-1]:.3g} now" in warned[0]
        assert len(progress.warnings) == 2, "the end says in how many steps"


def test_groups_that_dynamic_sampling_leaves_out_are_not_counted(tmp_path):
    """Of 32 groups that are drawn 24 have no signal, and the step trains on the other 8."""
    progress = RecordedProgress()
    run = SimpleNamespace(path=tmp_path, log=lambda _: None)
    sections = {"data": {"source": "jsonl", "prompts_per_step": 8}, "algorithm": {"dynamic_sampling": True}}
    with Alarms(default_run(sections), run, progress) as alarms:
        steps(alarms, [0.2] * 60, [24] * 60)
    assert progress.warnings == []
