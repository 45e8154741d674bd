"""A process that runs a user's code ends with its driver, whenever that goes."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings

PROGRAM = (
    "import sys; from anytron.task.isolation.worker import enter; enter(*map(int, sys.argv[1:])); print('it goes on')"
)


@pytest.mark.parametrize(
    ("driver", "status", "said"), [("there", 0, "it goes on\n"), ("gone", -signal.SIGKILL, "")], ids=["there", "gone"]
)
def test_a_driver_that_goes_before_its_process_has_begun_takes_it_along(driver, status, said):
    """The kernel tells of an end that comes later only."""
    ours, theirs = socket.socketpair()
    lifeline, held = os.pipe()
    with theirs, Connection(ours.detach()) as connection:
        start = {"sys_path": sys.path, "memory_gib": None, "progress": theirs.fileno()}
        connection.send_bytes(json.dumps(start).encode())
        if driver == "gone":
            os.close(held)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(lifeline)],
            pass_fds=(theirs.fileno(), lifeline),
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    os.close(lifeline)
    if driver == "there":
        os.close(held)
    assert (done.returncode, done.stdout) == (status, said), done.stderr


@pytest.mark.parametrize("tells", [True, False])
def test_a_call_has_one_answer_and_may_say_before_where_it_stands_if_that_was_agreed(tells, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    worker = "tests.core.task.isolation.telling"
    settings = ProcessSettings("A process", "here", worker, {}, timeout_s=60.0, memory_gib=None, start_timeout_s=120.0)
    process = IsolatedProcess(dataclasses.replace(settings, tells=tells), tmp_path / "log")
    try:
        process.send(["ab", "c"])
        found = []
        while len(found) < 5 and not any(isinstance(one, Gone) for one in found):
            process.connection.poll(60)
            found += [message for message in (process.receive(),) if message is not None]
    finally:
        process.end()
    if tells:
        assert found == [{"at": "a"}, {"at": "b"}, {"said": "ab"}, {"at": "c"}, {"said": "c"}]
    else:
        assert found[0] == {"at": "a"}, "that was the answer"
        assert found[1].nonsense
