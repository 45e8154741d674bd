"""``python -m verl.trainer.main_ppo`` on a processor: the example learns, in verl's own Ray workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "verl" / "train_on_cpu.sh"
RANKS = 2
REPLACED = ["verl.preprocess-thd-engine", "verl.postprocess-thd-engine", "verl.preprocess-bshd-engine",
            "verl.postprocess-bshd-engine"]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What the example leaves behind; it ends with an error if the reward is below 0.8."""
    path = tmp_path_factory.mktemp("verl")
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (path / "log").open("wb") as log:
        done = subprocess.run(
            ["bash", SCRIPT], env={**os.environ, "DIRECTORY": str(path), "PATH": tools}, cwd=path,
            stdout=log, stderr=log, timeout=3500, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (path / "log").read_text(errors="replace")[-5000:]
    return path


@pytest.fixture(scope="module")
def steps(directory):
    return [json.loads(line)["data"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_it_learns_to_sort(steps):
    rewards = [step["critic/score/mean"] for step in steps]
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 >= 0.8


def test_greedy_responses_are_as_good(steps):
    (reward,) = (value for name, value in steps[-1].items() if name.startswith("val-core/sort_digits/"))
    assert reward >= 0.8


def test_the_rollout_has_the_weights_that_are_trained(steps):
    # Megatron's probabilities of the tokens against those that they were drawn with: bfloat16 on both sides.
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 0.05
    assert min(step["training/rollout_actor_probs_pearson_corr"] for step in steps[5:]) > 0.999


def test_both_workers_compute_with_anytrons_layouts(directory):
    reports = [json.loads(path.read_text()) for path in directory.glob("patches-*.json")]
    assert len(reports) == RANKS
    for report in reports:
        outcomes = {row["id"]: row["outcome"] for row in report}
        assert [outcomes[name] for name in REPLACED] == ["applied"] * len(REPLACED)
