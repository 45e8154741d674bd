"""Programs that are run on the installed Megatron, one process for each rank: patches are global."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.device.patches.plan import installed_version

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def megatron_version():
    return installed_version("megatron-core")


@pytest.fixture(scope="session")
def run_program():
    """Run a program; on ``world`` ranks it gets RANK, WORLD_SIZE and STORE before its own arguments.

    What rank 0 prints last is JSON; that is the answer. Warnings of Megatron's own are not what is
    tested here (each version has others).
    """

    def run(name, *arguments, world=0, tmp_path=None):
        ranks = [[str(rank), str(world), str(tmp_path / "store")] for rank in range(world)] or [[]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAMS / name), *rank, *arguments],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in ranks
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors
        return json.loads(outputs[0][0].splitlines()[-1])

    return run


REPORT = pytest.StashKey[list]()


@pytest.fixture
def record_patches(request):
    """Show a ledger's report after the tests: which patches this version of Megatron got, and why not."""

    def record(report):
        request.config.stash[REPORT] = report

    return record


def pytest_terminal_summary(terminalreporter, config):
    report = config.stash.get(REPORT, [])
    if report:
        terminalreporter.section(f"patches on megatron-core {installed_version('megatron-core')}")
    for row in report:
        terminalreporter.write_line(f"{row['outcome']:<10} {row['id']}  {row['detail']}")
