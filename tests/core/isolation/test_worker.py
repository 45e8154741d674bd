"""A process that runs a user's code ends with its driver, whenever that goes."""

import json
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

PROGRAM = "import sys; from anytron.isolation.worker import enter; enter(*map(int, sys.argv[1:])); print('it goes on')"


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
