"""Tests marked ``mindspeed`` need a checkout of MindSpeed core_r0.16.0, named by ANYTRON_MINDSPEED."""

from __future__ import annotations

import os

import pytest

from plugins.ascend.tests.trajectories import ROOT, follow
from tests.backends.megatron.conftest import recorded, tiny_family, tiny_model

__all__ = ["recorded", "tiny_family", "tiny_model"]

VARIABLE = "ANYTRON_MINDSPEED"


@pytest.fixture
def with_mindspeed() -> dict[str, str]:
    """The environment of processes that import MindSpeed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ[VARIABLE], str(ROOT)])}


@pytest.fixture
def follow_engines(recorded, tmp_path, with_mindspeed):
    """Follow the recorded trajectories with engine after engine, in the same ranks: ``programs/follow.py``."""

    def run(platform, options, engines):
        return follow(recorded, platform, options, engines, tmp_path, with_mindspeed)

    return run
