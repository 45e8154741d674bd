"""The example of verl's own entry point, as tests run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "examples" / "verl"


def train(path, *overrides, **variables):
    """Run it in ``path``, with this environment's programs; return its exit status and what it says.

    The status is 1 where the reward stays below its bound, as it does in a few steps.
    """
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (path / "log").open("wb") as log:
        done = subprocess.run(
            ["bash", FOLDER / "train_on_cpu.sh", *overrides],
            env={**os.environ, "DIRECTORY": str(path), "PATH": tools, **variables}, cwd=path,
            stdout=log, stderr=log, timeout=3500, check=False,
        )  # fmt: skip
    return done.returncode, (path / "log").read_text(errors="replace")


def steps_in(path):
    """What verl logs of each step."""
    return [json.loads(line)["data"] for line in (path / "metrics.jsonl").read_text().splitlines()]
