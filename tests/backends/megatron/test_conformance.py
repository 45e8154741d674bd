"""The check ``mask-conformance``: tests in processes of their own, because Megatron is imported there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.workers.executor.processes import free_port

PROGRAM = Path(__file__).parent / "programs" / "conformance.py"


@pytest.mark.some(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_conformance(ranks):
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    plugins = ("-p", "tests.backends.megatron.without_triton", "-p", "no:cacheprovider", "-p", "no:randomly")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-W", "ignore", str(PROGRAM)]
    processes = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, outputs[0][-4000:]
