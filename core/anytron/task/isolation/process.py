"""The driver's side of a process that runs a user's code."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError
from anytron.base.files import exhausted, open_to_append
from anytron.task.isolation.failure import ending
from anytron.task.isolation.progress import Progress
from anytron.task.isolation.worker import STACK_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PROGRAM = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "import importlib; importlib.import_module(sys.argv[1]).main(*map(int, sys.argv[2:]))"
)
"""It does not import from the current directory, where a file ``logging.py``, for example, would be run."""
STACKS_S = 0.3
"""Seconds that a process that takes too long has to write its stacks."""
END_S = 2.0
"""Seconds that a process that has closed its channel has to end, so that its exit status is known."""
IO_TIMEOUT_S = 60.0
"""Seconds that a process may take to read a message, or to write the rest of a message that it has begun."""
LARGEST_ANSWER = 1 << 28
"""Bytes of the longest message that is read from a process, which could otherwise fill the driver's memory."""
LOG_TAIL_LINES = 30
"""Most lines of a process's log that a failure shows."""


@dataclass(frozen=True)
class ProcessSettings:
    """The code that a process runs, and its limits.

    Attributes:
        title: Name of the process in messages, for example ``A reward process``.
        where: Configuration key for errors.
        worker: Module whose ``main`` the process runs.
        start: The first message to the worker; plain values.
        timeout_s: Seconds that a call may take. They count from the sending of the call, or from the answer to the
            previous call if that is later. If the worker reports its position in the call (such as the index of the
            sample), they count from the last report (:meth:`IsolatedProcess.send`).
        memory_gib: Memory that the process may allocate; None = no limit.
        start_timeout_s: Seconds until the process must be ready.
        tells: Whether the worker may send messages with the key ``at`` before the answer to a call.
    """

    title: str
    where: str
    worker: str
    start: Mapping[str, Any]
    timeout_s: float
    memory_gib: float | None
    start_timeout_s: float
    tells: bool = False


@dataclass(frozen=True)
class Gone:
    """The end of a process that had not answered all calls.

    Attributes:
        late: Whether the process was killed because it took too long.
        why: Where its code was, or how it ended, with its last lines of output.
        killed: Whether a SIGKILL that Anytron did not send ended it.
        nonsense: Whether Anytron ended it because it wrote something that is not an answer.
        at: Position that the call had reached; None if the worker reported none.
    """

    late: bool
    why: str
    killed: bool = False
    nonsense: bool = False
    at: int | None = None


class IsolatedProcess:
    """A separate interpreter that leads its own session: it is killed together with all processes that it started.

    Use :meth:`send` for some calls, then :meth:`receive` until each has an answer, in order; then send the next calls.

    Args:
        settings: What the process runs, and its limits.
        log: File to which the output of the process is appended.

    Raises:
        DataError: The process could not be started.
        ResourceError: The machine has run out of memory, processes or files.

    Attributes:
        connection: Socket that is readable when :meth:`receive` can go on.
        deadline: Time at which :meth:`receive` must be called in any case, on the clock of :func:`time.monotonic`.
        progress: Shared memory in which the worker reports the position of a call, if it does.
        settings, log: The arguments.
    """

    def __init__(self, settings: ProcessSettings, log: Path) -> None:
        self.settings, self.log = settings, log
        self._ready = False
        self._owed: Sequence[object] = ()
        self._tokens = deque([secrets.token_hex()])  # of the answers that must come, the next one first
        self._steps = 0
        try:
            self._start()
        except OSError as error:
            raise exhausted(error, settings.where) or DataError(
                f"{settings.title} could not be started.",
                where=settings.where,
                why=str(error),
                fix=f"make sure that {sys.executable} can be executed, and that {log} can be written",
            ) from error

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(IO_TIMEOUT_S), 0)  # a stopped process neither reads nor writes
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = Connection(ours.detach())
        lifeline, self._lifeline = os.pipe()
        progress = Progress.made()
        self.progress = Progress(progress)
        try:
            with theirs, os.fdopen(open_to_append(self.log), "ab") as output:
                self._log_start = output.tell()
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [sys.executable, "-c", PROGRAM, self.settings.worker, str(theirs.fileno()), str(lifeline)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    pass_fds=(theirs.fileno(), lifeline, progress),
                    start_new_session=True,
                )
        finally:
            os.close(lifeline)
            os.close(progress)
        start = {
            **self.settings.start,
            "memory_gib": self.settings.memory_gib,
            "sys_path": sys.path,
            "progress": progress,
            "token": self._tokens[0],
        }
        self._write(json.dumps(start).encode())
        self.deadline = self._end = monotonic() + self.settings.start_timeout_s
        self._more = 0.0

    def send(self, calls: Sequence[object], steps: int = 0) -> None:
        """Make calls, one after another, as soon as the process is ready.

        The process reads all of them before it begins the first one. An object that two calls refer to becomes two
        objects there.

        Args:
            calls: The calls for the worker.
            steps: Number of positions that the worker may report in each call; the time limit then applies to each
                step.

        Raises:
            DataError: A call cannot be pickled.
        """
        self._owed, self._steps = calls, steps
        if self._ready:
            self._call()

    def receive(self) -> Mapping[str, Any] | Gone | None:
        """Return the next answer, or a :class:`Gone` if the process is late or has ended; None if there is nothing yet.

        An answer is a JSON object with the token of its call. The caller must check its content, and call
        :meth:`reject` if it is wrong.

        Raises:
            DataError: The process could not start, or cannot read the call.
        """
        try:
            frame = self.connection.recv_bytes(LARGEST_ANSWER) if self.connection.poll() else None
        except (EOFError, OSError):
            return self._lost()
        if frame is None:
            return self._overdue() if self._late() else None
        try:
            token, message = json.loads(frame)
        except (ValueError, TypeError, RecursionError) as error:
            return self.reject(f"text that is not an answer: {error}")
        if not self._tokens or token != self._tokens[0] or not isinstance(message, dict):
            return self.reject("an answer to no call, or to another call")
        if not (self.settings.tells and "at" in message):
            self._tokens.popleft()
        if not self._ready:
            self._ready = True
            if self._owed:
                self._call()
            return None
        if "unreadable" in message:
            raise DataError(
                f"{self.settings.title} cannot read a prompt's data.",
                where=self.settings.where,
                why=str(message["unreadable"]),
                fix="put only plain values, or objects of importable classes, into Prompt.data",
            )
        self._begin_time()
        return message

    def reject(self, answer: str) -> Gone:
        """End a process that sent something other than an answer, because its next messages cannot be trusted.

        Args:
            answer: What it wrote, as a phrase that follows "it wrote".

        Raises:
            DataError: The process was not ready yet.
        """
        why, at = f"it wrote {answer}", self.progress.position(self._steps)
        self.end()
        if not self._ready:
            raise self._never_started(why)
        return Gone(False, why, nonsense=True, at=at)

    @property
    def ended(self) -> bool:
        """Whether the process must be replaced, because it has ended or has written without a call."""
        return self._process.poll() is not None or (not self._tokens and self.connection.poll())

    def postpone(self, seconds: float) -> None:
        """Give the current call this many more seconds."""
        self.deadline, self._end, self._more = self.deadline + seconds, self._end + seconds, self._more + seconds

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self.progress.close()
        self.connection.close()

    def _call(self) -> None:
        try:
            frames = [pickle.dumps(call, protocol=5) for call in self._owed]
        except Exception as error:  # an object may refuse to be pickled in any way
            raise DataError(
                f"A prompt's data cannot be sent to {self.settings.title.lower()}.",
                where=self.settings.where,
                why=f"{type(error).__name__}: {error}",
                fix="put only plain values, or objects of importable classes, into Prompt.data",
            ) from error
        self._owed = ()
        tokens = [secrets.token_hex() for _ in frames]
        self._tokens.extend(tokens)
        self.progress.begin()  # before the worker can note anything
        self._write(json.dumps(tokens).encode(), *frames)  # one message with all frames would be a copy of them
        self._begin_time()

    def _begin_time(self) -> None:
        now, seconds = monotonic(), self.settings.timeout_s
        self.deadline, self._end, self._more = now + seconds, now + seconds * (1 + self._steps), 0.0

    def _late(self) -> bool:
        """Whether the time is over. It begins anew with each position that the worker reports."""
        if self._ready and monotonic() >= self.deadline:
            self.deadline = min(self.progress.since + self.settings.timeout_s + self._more, self._end)
        return monotonic() >= self.deadline

    def _write(self, *frames: bytes) -> None:
        # What became of a process that does not read is found by receive().
        with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            for frame in frames:
                self.connection.send_bytes(frame)

    def _overdue(self) -> Gone:
        os.kill(self._process.pid, STACK_SIGNAL)
        sleep(STACKS_S)
        stacks, at = self._tail(), self.progress.position(self._steps)
        self.end()
        if not self._ready:
            seconds = self.settings.start_timeout_s
            raise self._never_started(f"it was not ready within {seconds:g} s\n{stacks}", "executor.start_timeout_s")
        return Gone(True, f"its stacks, at the end of {self.log}:\n{stacks}", at=at)

    def _lost(self) -> Gone:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        status = self._process.poll()
        if status is None:
            fate = "it closed its channel or wrote an incomplete message, and is still running"
        else:
            fate = f"it {ending(status)}"
        tail, at = self._tail(), self.progress.position(self._steps)
        self.end()
        if not self._ready:
            raise self._never_started(f"{fate}\n{tail}".rstrip())
        why = f"{fate}; the last lines of {self.log}:\n{tail}" if tail else f"{fate}; it wrote nothing"
        return Gone(False, why, killed=status == -signal.SIGKILL, at=at)

    def _never_started(self, why: str, limit: str = "memory_gib if it is set") -> DataError:
        return DataError(
            f"{self.settings.title} could not start.",
            where=self.settings.where,
            why=why,
            fix=f"import less, raise {limit}, or load models in the first call instead of at import",
        )

    def _tail(self) -> str:
        """The last lines that this process wrote."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])
