"""The command line in a process, and the machine's own settings out of its way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "examples/grpo_sort.yaml")
COMMAND = [sys.executable, "-c", "from anytron.cli.main import run; run()"]


def anytron(*arguments, **env):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=os.environ | env, timeout=240, check=False
    )


@pytest.fixture
def clean(monkeypatch):
    for name in ("ANYTRON_PLATFORM", "ANYTRON_PLUGINS", "ANYTRON_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
