"""One worker process as the driver sees it: start it, end it, and say what became of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from anytron.executor.channel import encode_json
from anytron.executor.worker import STACK_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from anytron.executor.bootstrap import Bootstrap
    from anytron.executor.channel import Message

LOG_TAIL_LINES = 30
"""Lines of a worker's log that an error shows."""
TERMINATE_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""


class WorkerProcess:
    """A worker process, the leader of a session of its own, with its channel and its log.

    A session of its own keeps a Ctrl-C at the terminal from reaching it (the driver ends it), and
    lets whatever the engine starts be ended with it.

    Attributes:
        name: For people: role and rank.
        connection: The starter's end of the channel.
        log: File that holds all that the process writes.
    """

    def __init__(self, bootstrap: Bootstrap, env: Mapping[str, str], log: Path, io_timeout_s: float) -> None:
        self.name = f"{bootstrap.role} rank {bootstrap.rank}"
        self.log = log
        ours, theirs = socket.socketpair()
        # A stopped process reads nothing: without a limit, writing to it would block for ever.
        limit = struct.pack("ll", int(io_timeout_s) + 1, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = Connection(ours.detach())
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "anytron.executor.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.send(encode_json(asdict(bootstrap)))

    @property
    def where(self) -> str:
        """The log, for people."""
        return str(self.log)

    @property
    def pid(self) -> int:
        """Process id, which is its process group's too."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message.

        A process that is gone gets none; how it ended is found where its answer is awaited.

        Raises:
            BlockingIOError: The process did not read it within ``io_timeout_s``.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(message)

    def receive(self) -> Message | None:
        """Take the message that has come; None if the process ended without one."""
        try:
            return self.connection.recv_bytes() if self.connection.poll() else None
        except (EOFError, ConnectionResetError, BlockingIOError):
            return None

    def ended(self) -> bool:
        """Whether the process is no more."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all that it has started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # everything of it is gone, which is what a signal is sent for

    def write_stacks(self) -> None:
        """Ask the process to write the stacks of its threads to its log."""
        if not self.ended():
            os.kill(self.pid, STACK_SIGNAL)

    def release(self) -> None:
        """Kill what is left of the process's group, reap the process, and close the channel."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def fate(self) -> str:
        """Say how an ended process ended."""
        status = self._process.poll()
        if status is None:
            return "it closed its channel and still runs"
        if status < 0:
            return f"it was killed by {signal.Signals(-status).name}"
        return f"it exited with status {status}"

    def log_tail(self) -> str:
        """The last lines that the process wrote; empty if there are none."""
        return tail(self.log)


def tail(log: Path) -> str:
    """The last lines of a log; empty if there are none.

    Raises:
        OSError: The file cannot be read.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def answered(processes: Sequence[WorkerProcess], timeout_s: float) -> list[WorkerProcess]:
    """Wait until a process has sent something or has ended; return all of which that holds then.

    A process that ended is looked for too, at the end of the wait: a child of it may keep its channel open.
    """
    ready = wait([process.connection for process in processes], timeout_s)
    return [process for process in processes if process.connection in ready or process.ended()]


def end_all(processes: Sequence[WorkerProcess]) -> None:
    """End processes: SIGTERM, a moment's grace for all together, SIGKILL."""
    for process in processes:
        process.signal(signal.SIGTERM)
        # A stopped process cannot act on SIGTERM.
        process.signal(signal.SIGCONT)
    deadline = time.monotonic() + TERMINATE_GRACE_S
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.release()
