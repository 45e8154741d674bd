"""Fork the ranks of a group of tests, and end them when one has ended or the time is over."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING

import pytest

from tests.core.workers.executor.processes import free_port
from tests.megatron_lm.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """Limits of a group.

    Attributes:
        test: Seconds of one test.
        group: Seconds of the group.
        gib: Memory of one rank, in GiB.
        tests: Tests that a rank runs; None: all.
    """

    test: float
    group: float
    gib: float
    tests: int | None = None


def run_ranks(root: Path, paths: Sequence[str], files: Sequence[Path], done: Collection[str], limits: Limits) -> None:
    """Run tests in one process per file, forked from this one, and wait for all of them.

    Args:
        root: The checkout.
        paths: Folders and files of ``tests/unit_tests``.
        files: Where each rank records its outcomes.
        done: Tests that are left out.
        limits: When the processes are ended.
    """
    os.environ |= {
        "WORLD_SIZE": str(len(files)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = {_fork(root, paths, rank, file, done, limits) for rank, file in enumerate(files)}
    running = set(ranks)
    end, first_end = monotonic() + limits.group, None
    try:
        while running and monotonic() < min(end, (first_end or end) + limits.test + 15):
            ended = {process for process in running if os.waitpid(process, os.WNOHANG)[0]}
            if ended and first_end is None:
                first_end = monotonic()
            running -= ended
            sleep(0.1)
    finally:
        for process in running:  # first all stop, so that none sees another's end and calls it a failure of its test
            os.kill(process, signal.SIGSTOP)
        for process in ranks:  # each is a group, in which its children may be left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        for process in running:
            os.kill(process, signal.SIGKILL)  # it may not lead a group yet
            os.waitpid(process, 0)


def _fork(root: Path, paths: Sequence[str], rank: int, file: Path, done: Collection[str], limits: Limits) -> int:
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (int(limits.gib * 2**30),) * 2)
        log = os.open(f"{file}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.chdir(root)
        options = "-q -p no:cacheprovider -p no:randomly -o addopts= --tb=short --no-header -W ignore"
        names = [f"tests/unit_tests/{path}" for path in paths]
        arguments = [*options.split(), f"--rootdir={root}", "--continue-on-collection-errors", *names]
        pytest.main(arguments, plugins=[Recorder(file, done, limits.test, limits.tests, os.dup(log))])
    except BaseException:  # noqa: BLE001 - written to the log; the process ends here in any case
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(0)
