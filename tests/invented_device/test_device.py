"""The invented accelerator is not the host: what it refuses, and what a missing wait reads."""

import json
import signal

import pytest

from tests.invented_device.conftest import PROGRAMS

pytestmark = pytest.mark.compiler


def test_its_streams_memory_and_numbers_are_its_own(run):
    done = run(str(PROGRAMS / "behaviour.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["device"], found["devices"]) == ("invented", 2)
    assert (found["without a wait"], found["after a wait"]) == ([0, 0, 0], [1, 1, 1])
    assert (found["pinned, early"], found["pinned, late"]) == ([0, 0, 0], [1, 1, 1])
    assert found["overwritten too early"] == [7, 7, 7]
    assert "no float64" in found["float64"]
    assert "two devices" in found["two devices"]
    assert "found a tensor on cpu" in found["host and device"]
    assert found["a petabyte"].startswith("OutOfMemoryError")
    assert found["own random numbers"] == [True, False]


def test_the_host_cannot_read_its_memory(run):
    assert run(str(PROGRAMS / "behaviour.py"), "address").returncode == -signal.SIGSEGV
