"""A loss of the user's own, in a file beside a copy of an example: the command line, real Megatron, real processes."""

import shutil
import sys
from subprocess import run

import pytest

from tests.demo.test_grpo_sort import EXAMPLE, records, users_environment

LOSSES = """
from anytron.algorithms.contract import TokenLosses

def reinforce(tokens, algorithm):
    cost = -tokens.advantages * tokens.log_probs
    return TokenLosses(cost, {"cost": cost})

def careless(tokens, algorithm):
    return TokenLosses(tokens.log_probs * algorithm.options["factor"])
"""
SMALL = ("trainer.total_steps=5", "trainer.save_hf=false", "data.prompts_per_step=8", "rollout.samples_per_prompt=8")


@pytest.fixture
def train(tmp_path):
    """Train with a loss as a user does whose current directory is that of the files, or another one."""
    (tmp_path / "mine").mkdir()
    for file in (EXAMPLE, EXAMPLE.with_name("sort_digits.py")):
        shutil.copy(file, tmp_path / "mine" / file.name)
    (tmp_path / "mine" / "my.py").write_text(LOSSES)

    def train(loss, *overrides, config="grpo_sort.yaml"):
        command = [sys.executable, "-m", "anytron", "train", config, f"algorithm.loss={loss}", *SMALL, *overrides]
        environment, folder = users_environment(), tmp_path / "mine"
        return run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)

    return train


@pytest.mark.slow
def test_it_is_what_is_trained_with(train, tmp_path):
    done = train("my.py:reinforce", "algorithm.aggregation=token-mean", "trainer.output_dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = records(tmp_path / "mine" / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        # Metrics are means over tokens, and so is the loss then; that of `ppo_clip` would be near to 0.
        assert line["loss/policy"] == pytest.approx(line["loss/metrics/cost"], rel=1e-5)
        assert line["grad_norm"] > 0
    assert max(abs(line["loss/policy"]) for line in lines) > 1e-3


def test_one_that_raises_is_named_with_its_line(train, tmp_path):
    done = train("my.py:careless")
    assert done.returncode == 1
    file = tmp_path / "mine" / "my.py"
    for line in (
        "error: A policy's loss raised an exception.",
        f"  where: algorithm.loss: {file}:careless",
        f"  why: KeyError: 'factor' (line 9 of {file})",
        f'      File "{file}", line 9, in careless',
    ):
        assert line in done.stderr.splitlines(), done.stderr
    assert f"  fix: correct line 9 of {file}; tokens is a PolicyTokens, and a PolicyTokens has log_probs" in done.stderr
    assert "/anytron/" not in done.stderr, "frames are the user's"
    assert "trainer-0.log" in done.stderr


def test_one_beside_the_user_and_not_beside_the_configuration_is_told_how_to_be_named(train, tmp_path):
    done = train("my.py:reinforce", config=str(EXAMPLE))
    assert done.returncode == 1
    assert f"for the file in the current directory, write {tmp_path / 'mine' / 'my.py'}" in done.stderr
