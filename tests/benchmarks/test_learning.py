"""The comparison of learning reads the runs that it has kept, and lays their figures out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from anytron.config.load import load_config
from tests.house import ROOT


def kept(folder, side, seed, rewards, second, peak):
    run = folder / f"{side}-{seed}"
    run.mkdir(parents=True)
    made = {"rewards": rewards, "seconds": [second] * len(rewards), "keys": [], "peak_bytes": peak}
    made["accuracy"] = 0.5 + seed / 4
    (run / "result.json").write_text(json.dumps(made))


def test_kept_runs_become_means_spreads_and_ratios(tmp_path):
    for seed in range(2):
        kept(tmp_path, "anytron", seed, [0.0] * 15 + [0.2 + 0.2 * seed] * 10, 2.0, 3)
        kept(tmp_path, "trl", seed, [0.5] * 25, 5.0, 6)
    program = [sys.executable, ROOT / "benchmarks" / "learning.py", "--keep", tmp_path, "--seeds", "2", "--steps", "25"]
    picture = tmp_path / "learning.svg"
    done = subprocess.run([*program, "--plot", picture, "--json"], capture_output=True, text=True, check=True)

    figures = json.loads(done.stdout)["figures"]
    assert (figures["ratio"], figures["peak_ratio"]) == (2.5, 2.0)
    ours, theirs = figures["side"]["anytron"], figures["side"]["trl"]
    assert ours["reward_at_25"] == pytest.approx(0.3)
    assert ours["spread_at_25"] == pytest.approx(0.2 / 2**0.5)
    assert ours["accuracy"] == 0.625
    assert (theirs["reward_at_25"], theirs["spread_at_25"]) == (0.5, 0.0)
    assert picture.read_text().startswith("<?xml")

    refused = subprocess.run([*program, "optimizer.lr=1"], capture_output=True, text=True, check=False)
    assert "is of a run with [], not ['optimizer.lr=1']" in refused.stderr

    program[-1] = "26"
    refused = subprocess.run(program, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "is of 25 steps, not 26" in refused.stderr


def test_the_command_of_our_side_is_a_configuration(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from learning import EXAMPLE, anytron_command

    command = anytron_command(3, 1, tmp_path, ["rollout.samples_per_prompt=2"])
    overrides = command[command.index(str(EXAMPLE)) + 1 :]
    config = load_config(EXAMPLE, overrides)
    assert (config.trainer.total_steps, config.trainer.seed, config.validation) == (3, 1, None)
    assert config.rollout.samples_per_prompt == 2
