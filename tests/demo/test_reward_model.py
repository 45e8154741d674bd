"""GRPO from a reward model, run as a user runs it: processes of their own, and a layout that is not the policy's."""

import json
import subprocess
import sys
import time

import pytest

from anytron_conformance.training.sort_task import VOCABULARY
from tests.demo.test_grpo_sort import ROOT, anytron, kill_writer_of, records, users_environment
from tests.reward_models import write_judge_of_last_tokens

EOS = VOCABULARY.index("<eos>")
WORTH = [digit / 9 for digit in range(10)] + [-1.0] * 6
"""Of the last token in front of the end: the policy is to end with a 9."""


def arguments(output, judge, reward_model, *overrides):
    judged = {"path": str(judge), "max_tokens_per_micro_batch": 512, **reward_model}
    return (
        "train",
        str(ROOT / "examples" / "grpo_sort.yaml"),
        f"trainer.output_dir={output}",
        f"reward_model={json.dumps(judged)}",
        "rewards=[{function: reward_model}]",
        "tracking.plot=false",
        *overrides,
    )


def train(output, judge, reward_model, *overrides):
    finished = anytron(*arguments(output, judge, reward_model, *overrides))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return records(output / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("reward_model", "policy"),
    [({}, ()), ({"parallel": {"tensor_model_parallel_size": 2}, "offload": True}, ("parallel.data_parallel_size=2",))],
    ids=["one", "tp2-beside-dp2"],
)
def test_a_policy_learns_what_a_reward_model_likes(reward_model, policy, tmp_path):
    judge = write_judge_of_last_tokens(tmp_path / "judge", WORTH, padding=EOS)
    steps = ("trainer.total_steps=60", "optimizer.lr=2e-3", "optimizer.schedule=constant")
    metrics = train(tmp_path / "run", judge, reward_model, *steps, *policy)
    means = [line["reward/mean"] for line in metrics]
    assert means[0] < 0.5
    assert sum(means[-5:]) / 5 > 0.9
    assert (tmp_path / "run" / "logs" / "reward_model-0.log").is_file()
    assert "reward_model" in json.loads((tmp_path / "run" / "patches.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_of_it_that_is_killed_costs_time_and_no_result(tmp_path):
    judge = write_judge_of_last_tokens(tmp_path / "judge", WORTH, padding=EOS)
    overrides = ("trainer.total_steps=12", "checkpoint.every_steps=2", "optimizer.schedule=constant")
    undisturbed = train(tmp_path / "undisturbed", judge, {}, *overrides)
    output = tmp_path / "killed"
    path = output / "metrics.jsonl"
    command = [sys.executable, "-m", "anytron", *arguments(output, judge, {}, *overrides)]
    with subprocess.Popen(command, env=users_environment()) as run:
        while run.poll() is None and not (path.exists() and len(path.read_text().splitlines()) >= 3):
            time.sleep(0.02)
        kill_writer_of(output / "logs" / "reward_model-0.log")
    assert run.returncode == 0
    (loss,) = records(output / "losses.jsonl")
    assert "eward model" in json.dumps(loss)
    compared = ("step", "reward/mean", "loss/policy", "grad_norm", "policy/entropy")
    found = [[{name: line[name] for name in compared} for line in lines] for lines in (records(path), undisturbed)]
    assert found[0] == found[1]
