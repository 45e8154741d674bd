"""The examples for NPUs fit on theirs, by arithmetic that needs neither a device nor weights."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.config.diagnostics import refuse
from anytron.device.loading import open_session
from anytron.run.preflight.capabilities import platform_diagnostics
from anytron.run.preflight.limits import limit_diagnostics
from tests.recipes import recipes

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
    assert not any("engine" in one for one in plan["assumed"]), "the engine's own estimate is there"
    (device,) = plan["devices"]
    assert {process["who"] for process in device["processes"]} == {"training rank", "rollout replica"}
    (planned,) = re.findall(
        r"^# .*Planned: ([\d.]+) of 64 GiB", (EXAMPLES / f"{example}.yaml").read_text(), re.MULTILINE
    )
    assert float(planned) == pytest.approx(device["needed_bytes"] / 2**30, abs=0.06)


@pytest.mark.parametrize("recipe", recipes("NPUs"), ids=str)
def test_a_recipe_for_npus_is_accepted(recipe):
    run = recipe.run()
    session = open_session(run.platform.name, run.platform.options, run.engine.name)
    _, found = session.hooks.remarks(run)
    refuse([*found, *limit_diagnostics(run, session.platform), *platform_diagnostics(run, session.platform)])
