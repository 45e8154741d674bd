"""Collectives between processes."""

import contextlib
import fcntl
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def with_a_missing_rank(run_program):
    """What two ranks print of which the second leaves before a collective; neither destroys its group."""
    return run_program("missing_rank.py", ranks=2, environment={"ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT": "2"})


def left_by_the_dead():
    """Directories of communicators that no process holds any more."""
    left = set()
    for path in Path("/dev/shm").glob("anytron-hccl-*"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.add(path)
        os.close(descriptor)
    return left


def test_collectives_on_two_ranks(run_program):
    outputs = run_program("collectives.py", ranks=2, environment={"ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT": "60"})
    for output in outputs:
        assert "WRONG" not in output, output
        assert output.count("ok ") >= 19, output
    # Both ranks' calls are told.
    said = "".join(outputs)
    assert "mismatch: " in said
    assert "of 2 elements" in said
    assert "of 3 elements" in said


def test_a_rank_that_never_comes_is_named(with_a_missing_rank):
    assert "ok" in with_a_missing_rank[0], with_a_missing_rank
    assert "rank 1 did not come in 2 s" in with_a_missing_rank[0]


def test_what_a_crashed_process_left_is_removed(with_a_missing_rank, run_program):
    left = left_by_the_dead()
    assert left
    run_program(
        "import ctypes\n"
        "from anytron_ascend_simulator import preload\n"
        "preload()\n"
        "ctypes.CDLL('libhccl.so').HcclGetRootInfo(ctypes.create_string_buffer(8192))\n"
    )
    assert not left & left_by_the_dead()
