"""Portable modules with the neutral kernels bound, and programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.device.loading import hooks_of
from tests.core.workers.executor.processes import free_port

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def bound():
    """The neutral defaults, bound for the time of a test."""
    from anytron_megatron.portable_te.binding import bind

    hooks = hooks_of()
    undo = bind(hooks, "cpu")
    yield hooks
    undo()


@pytest.fixture(scope="session")
def run_program(tmp_path_factory):
    """Run a program of this folder in N ranks; give what rank 0 printed, fail with the output of those that failed."""
    # Nothing that lies there can be imported by accident.
    empty = tmp_path_factory.mktemp("empty")

    def run(name: str, *arguments: str, ranks: int = 1) -> str:
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        command = [sys.executable, "-W", "ignore", str(PROGRAMS / name), *arguments]
        processes = [
            subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=empty,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = []
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs, strict=True):
            assert process.returncode == 0, output[-4000:]
        return outputs[0]

    return run
