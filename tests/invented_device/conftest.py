"""The invented accelerator, installed for the processes that a test starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.house import ROOT
from tests.invented_device.build import installed


@pytest.fixture(scope="session")
def device():
    """Environment variables of a machine that has the invented accelerator."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler, g++")
    path = os.pathsep.join(filter(None, [str(installed()), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def run(device, tmp_path):
    """Run a module or a program of this folder on such a machine, in an empty directory."""

    def started(*command, **environment):
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env={**device, **environment}, capture_output=True, text=True,
            check=False, timeout=600,
        )  # fmt: skip

    return started


@pytest.fixture
def anytron(run):
    """Run a command of anytron on such a machine."""
    return lambda *command, **environment: run("-m", "anytron", *command, **environment)


EXAMPLE = str(ROOT / "examples" / "grpo_sort.yaml")
PROGRAMS = ROOT / "tests" / "invented_device" / "programs"
