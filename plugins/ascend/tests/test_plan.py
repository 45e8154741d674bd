"""The examples for NPUs fit on theirs, by arithmetic that needs neither a device nor weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "npu"
PARAMETERS = {"grpo_qwen3_8b": 8_190_735_360, "grpo_qwen3_30b_a3b": 30_532_122_624}
"""Of the published models."""


@pytest.mark.parametrize("example", PARAMETERS)
def test_an_example_fits(example):
    command = [
        sys.executable,
        "-m",
        "anytron",
        "plan",
        str(EXAMPLES / f"{example}.yaml"),
        "--memory",
        "64GiB",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["parameters"] == PARAMETERS[example]
    assert plan["fits"]
    (device,) = plan["devices"]
    assert {process["who"] for process in device["processes"]} == {"training rank", "rollout replica"}
