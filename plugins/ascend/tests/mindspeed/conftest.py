"""Tests marked ``mindspeed`` need a checkout of MindSpeed core_r0.16.0, named by ANYTRON_MINDSPEED."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.backends.megatron.conftest import recorded, tiny_family, tiny_model

__all__ = ["recorded", "tiny_family", "tiny_model"]

VARIABLE = "ANYTRON_MINDSPEED"
PROGRAMS = Path(__file__).parents[1] / "programs"
ROOT = Path(__file__).parents[4]


@pytest.fixture
def with_mindspeed() -> dict[str, str]:
    """The environment of processes that import MindSpeed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ[VARIABLE], str(ROOT)])}


@pytest.fixture
def follow_engines(recorded, tmp_path, with_mindspeed):
    """Follow the recorded trajectories with engine after engine, in the same ranks: ``programs/follow.py``."""

    def run(platform, options, engines):
        torch.save(recorded, tmp_path / "recorded.pt")
        plan = {"platform": platform, "options": options, "recorded": str(tmp_path / "recorded.pt")}
        plan["engines"] = [(str(directory), sections) for directory, sections in engines]
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        output = tmp_path / f"{platform}.pt"
        command = [sys.executable, str(PROGRAMS / "follow.py"), str(tmp_path / "plan.json"), str(output)]
        done = subprocess.run(command, env=with_mindspeed, capture_output=True, text=True, check=False, timeout=560)
        assert done.returncode == 0, done.stderr[-4000:]
        return torch.load(output, weights_only=False)

    return run
