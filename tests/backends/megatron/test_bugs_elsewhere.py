"""What went wrong in other trainers around the hooks of a micro-batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "micro_batches.py"


def test_hooks_of_a_micro_batch_in_a_process_that_may_import_megatron():
    """Bugs 1, 2, 3 and #5904 (see the program): lengths before the last padding, told per tensor, masks."""
    plugins = ("-p", "tests.backends.megatron.without_triton", "-p", "no:cacheprovider", "-p", "no:randomly")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 passed" in done.stdout
