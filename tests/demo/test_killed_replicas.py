"""Agents use the endpoint of a run while its replicas are killed one after the other: nothing differs."""

import subprocess
import sys

import pytest

from tests.house import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("started_cold")  # processes of the run are found by the environment that they began with
def test_a_replica_killed_every_five_seconds_changes_no_weight():
    program = ROOT / "tests" / "faults" / "killed_replicas.py"
    command = [sys.executable, program, "--steps", "16", "data.prompts_per_step=4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
