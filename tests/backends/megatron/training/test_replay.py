"""``anytron replay``: from a run that meets a NaN to the place where it arises."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.docs.test_pages import blocks
from tests.house import ROOT

LOSS = """
import torch
from anytron.algorithms.contract import TokenLosses
from anytron.algorithms.losses import ppo_clip

calls = []

def steep(tokens, algorithm):
    calls.append(1)
    found = ppo_clip(tokens, algorithm)
    broken = torch.sqrt(torch.sum(0 * tokens.log_probs)) if len(calls) > 1 else 0.0  # its derivative is 0 * infinity
    return TokenLosses(found.per_token + broken, found.metrics)
"""


PAGE = "docs/how-to/debug-bad-numbers.md"


def anytron(*arguments, cwd=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "anytron", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_that_meets_a_nan_can_be_looked_into(tmp_path):
    (tmp_path / "loss.py").write_text(LOSS)
    train = anytron(
        *("train", ROOT / "examples" / "grpo_sort.yaml", "trainer.total_steps=3", "data.prompts_per_step=2"),
        *(f"trainer.output_dir={tmp_path}/run", f"algorithm.loss={tmp_path}/loss.py:steep"),
        *("trainer.on_non_finite=skip", "trainer.max_skipped_updates=1", "checkpoint.every_steps=1"),
    )
    assert train.returncode == 1
    assert "2 updates in a row" in train.stderr
    skipped, last = sorted((tmp_path / "run" / "bad_batches").iterdir())
    assert str(last) in train.stderr.replace("\n", "")

    # The saved loss is fine in its first call, which a replay's is: the run's own function shows it from the second on.
    fine = anytron("replay", last, "algorithm.loss=ppo_clip", "--json")
    assert fine.returncode == 0, fine.stderr
    assert json.loads(fine.stdout)["inspection"]["first"] is None

    (tmp_path / "loss.py").write_text(LOSS.replace("len(calls) > 1", "True"))
    for batch, options, origin in (
        (last, (), "its weights at that time"),
        (skipped, ("--checkpoint", tmp_path / "run"), "the checkpoint of step 2"),
        (skipped, (), "the initial model"),
    ):
        found = anytron("replay", batch, *options)
        assert found.returncode == 1, found.stderr
        assert f"from {origin}" in found.stderr
        assert "first in the passes: nan in the gradient of loss (by log_probs)'s input" in found.stdout
        # The prompt has tokens 0 to 4, and no loss.
        assert "micro-batch 0, sequence 0 of the mini-batch, token 5" in found.stdout

    # The page's commands, word for word.
    shutil.copytree(last, tmp_path / "runs/questions/bad_batches/step-000312-update-1")
    commands = [shlex.split(block) for block in blocks(PAGE, "sh") if block.startswith("anytron replay")]
    assert len(commands) == 3
    for command in commands:
        found = anytron(*command[1:], cwd=tmp_path)
        assert found.returncode == 1, found.stderr
        assert "first in the passes: nan in the gradient of loss (by log_probs)'s input" in found.stdout
