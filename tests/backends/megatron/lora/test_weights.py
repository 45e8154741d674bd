"""The model's own weights under adapters: not one bit of them changes, neither by updates nor by merging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "adapters.py"


def test_weights_bit_by_bit_in_a_process_that_may_import_megatron(tiny_family, tmp_path):
    for family in ("qwen3", "deepseek_v3"):
        (tmp_path / family).symlink_to(tiny_family(family))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(PROGRAM)]
    environment = {**os.environ, "TINY_MODELS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 passed" in done.stdout
