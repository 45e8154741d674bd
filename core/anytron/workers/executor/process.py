"""The driver's side of one worker process: start it, end it, and describe how it ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import WorkerError
from anytron.base.files import exhausted, open_to_append
from anytron.task.isolation.failure import ending
from anytron.workers.executor.channel import Build, encode_json
from anytron.workers.executor.heartbeat import BEAT_S, Heartbeat, Standing, shared_memory
from anytron.workers.executor.worker import STACK_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anytron.workers.executor.channel import Bootstrap, Message

LOG_TAIL_LINES = 30
"""Lines of a worker's log that an error shows."""
LOG_TAIL_BYTES = 1 << 16
"""Bytes at the end of a log that are read to find these lines."""
END_GRACE_S = 2.0
"""Seconds between SIGHUP and SIGKILL."""
SECOND_LOOK_S = 2 * BEAT_S
"""Seconds after which a worker without heartbeats is checked again: if the machine stood still, it beats again."""
# ``python -m`` and ``-c`` put the current directory first on sys.path: a logging.py that lies there would be imported.
# Not ``-P``, which Python 3.10 lacks, and not PYTHONSAFEPATH, which processes that the engine starts would inherit.
START_WORKER = (
    "import sys; sys.path[:] = filter(None, sys.path); from anytron.workers.executor.worker import run; run()"
)


class WorkerProcess:
    """A worker process, which leads its own session, with its channel, its heartbeat and its log.

    In its own session, Ctrl-C at the terminal does not reach the process (the driver ends it), and all processes that
    the engine starts can be ended with it.

    The process imports its engine and waits for :meth:`build`.

    Args:
        bootstrap: Bootstrap message of the worker.
        env: Environment of the process.
        log: File to which the output of the process is appended; None = :meth:`build` will name it, and until then the
            output is kept in memory.
        heartbeat_timeout_s: Seconds without a heartbeat after which the process counts as lost.

    Attributes:
        name: Display name: role, replica and rank.
        connection: The driver's end of the channel, a socket pair.
        log: The argument ``log``, or the log that was passed to :meth:`build`.
        log_name: File name that the log should have.

    Raises:
        ResourceError: No file descriptors or disk space are left for the process.
        WorkerError: The process cannot be started, or its log cannot be written.
    """

    def __init__(
        self, bootstrap: Bootstrap, env: Mapping[str, str], log: Path | None, heartbeat_timeout_s: float
    ) -> None:
        self.name, self.log_name = bootstrap.name, bootstrap.log
        self.log = log
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._suspected_at: float | None = None
        self._early_output = -1
        with self._started(), contextlib.ExitStack() as opened:
            self._start(opened, bootstrap.python or sys.executable, env)
        self.send(encode_json(asdict(bootstrap)))

    def build(self, init_method: str, log: Path) -> None:
        """Let the process build its engine; it answers when the engine is built.

        Args:
            init_method: Rendezvous of the group's ranks, for ``torch.distributed``.
            log: File to which all output of the process is appended, including its output so far; not used if the
                process had a log from the beginning.

        Raises:
            ResourceError: No disk space is left for the log.
            WorkerError: The log cannot be written.
        """
        moved = self.log is None
        if moved:
            self.log = log
            with self._started():
                descriptor, self._log_start = _open_log(log, self.name)
                os.close(descriptor)
        self.send(encode_json(asdict(Build(init_method, str(log) if moved else None))))

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        """Convert an ``OSError`` to an error which says that this process could not be started."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ELOOP:
                fix = "remove the symbolic link at this path: logs are not written through links"
            else:
                fix = "make sure that this user may start the Python interpreter and write the log"
            raise exhausted(error, f"start of {self.name}") or WorkerError(
                f"{self.name.capitalize()} could not be started.",
                where=self.where,
                why=str(error),
                fix=fix,
            ) from error

    def _start(self, opened: contextlib.ExitStack, python: str, env: Mapping[str, str]) -> None:
        if self.log is None:
            output = os.memfd_create("anytron-output")
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
        else:
            output, self._log_start = _open_log(self.log, self.name)
        opened.callback(os.close, output)
        memory = shared_memory()
        opened.callback(os.close, memory)
        ours, theirs = socket.socketpair()
        opened.enter_context(theirs)
        # A process that is stopped reads nothing: without a limit, writing to it would block for ever.
        limit = struct.pack("ll", int(self._heartbeat_timeout_s) + 1, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = Connection(ours.detach())  # closes itself when nothing refers to it
        self._heartbeat = Heartbeat(memory)
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, or the user's, and our own module
            [python, "-c", START_WORKER, str(theirs.fileno()), str(memory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=(theirs.fileno(), memory),
            start_new_session=True,
        )
        if self.log is None:
            self._early_output = os.dup(output)

    @property
    def where(self) -> str:
        """The path of the log, for messages; empty before :meth:`build`."""
        return "" if self.log is None else str(self.log)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message.

        If the process has ended, nothing is sent; the wait for its answer reports how it ended.

        Raises:
            BlockingIOError: The process did not read it within ``heartbeat_timeout_s``.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(message)

    def receive(self) -> Message | None:
        """Receive the message that has arrived; None if the process ended without one."""
        try:
            return self.connection.recv_bytes() if self.connection.poll() else None
        except (EOFError, ConnectionResetError, BlockingIOError):
            return None

    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def silent(self) -> bool:
        """Whether there was no heartbeat for ``heartbeat_timeout_s``, and still none :data:`SECOND_LOOK_S` later."""
        if self._heartbeat.silence_s() < self._heartbeat_timeout_s:
            self._suspected_at = None
            return False
        if self._suspected_at is None:
            self._suspected_at = time.monotonic()
        return time.monotonic() - self._suspected_at >= SECOND_LOOK_S

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all processes that it has started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # everything of it is gone, which is what a signal is sent for

    def write_stacks(self) -> None:
        """Ask the process to write the stacks of its threads to its log; a stopped process is continued for that.

        It is continued first, because a signal for a stopped process is delivered to the thread that wakes first, and a
        thread that reads the stack of another, running thread may crash. In a running process, Linux delivers the
        signal to the main thread.
        """
        if not self.ended():
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, STACK_SIGNAL)

    def standing(self) -> Standing | None:
        """Return the state that the previous call of this method asked for (None = unknown), and ask for a new one."""
        note = self._heartbeat.read()
        self._heartbeat.ask()
        return Standing.decode(note)

    def release(self) -> None:
        """Kill what remains of the process and of the processes that it has started, and close the channel.

        Output that the process kept in memory until its end is appended to the log.
        """
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        if self.log is not None and (early := self._early()):
            with contextlib.suppress(OSError):  # a full disk
                self.note(early.decode(errors="replace"))
        if self._early_output >= 0:
            os.close(self._early_output)
            self._early_output = -1

    def fate(self) -> str:
        """Return how the process ended, or what is wrong if it still runs."""
        status = self._process.poll()
        if status is None:
            silence_s = self._heartbeat.silence_s()
            if silence_s < self._heartbeat_timeout_s:
                return "it runs, but does not answer"
            return f"it has given no sign of life for {silence_s:.0f} s{_standing(self.pid)}"
        return f"it {ending(status)}"

    def note(self, text: str) -> None:
        """Append a paragraph to the log.

        Raises:
            OSError: The log cannot be written.
        """
        assert self.log is not None, "it has a log since build() was called, at the latest"
        with os.fdopen(open_to_append(self.log), "w", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def log_tail(self) -> str:
        """The last lines that the process wrote; empty if there are none."""
        written = b"" if self.log is None else _end_of(self.log, self._log_start)
        return _last_lines(written + self._early())

    def _early(self) -> bytes:
        """Return the output that the process has kept in memory, and not moved to its log."""
        early = self._early_output
        return b"" if early < 0 else os.pread(early, os.fstat(early).st_size, 0)


def _open_log(log: Path, name: str) -> tuple[int, int]:
    """Open a log to append to it, because an earlier process may have written there why it ended.

    Returns:
        A descriptor, and the offset at which the new process's output begins.
    """
    descriptor = open_to_append(log)
    os.write(descriptor, f"=== {name} starts at {time.strftime('%Y-%m-%d %H:%M:%S %z')}\n".encode())
    return descriptor, os.lseek(descriptor, 0, os.SEEK_END)


def _standing(pid: int) -> str:
    """Describe in brackets the state in which the kernel holds a process; empty if it is not held."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""
    meaning = {"T": "it is stopped", "t": "a debugger holds it", "D": "it waits in the kernel, mostly for a disk"}
    return f" ({meaning[state]})" if state in meaning else ""


def tail(log: Path) -> str:
    """The last lines of a log; empty if there are none.

    Raises:
        OSError: The file cannot be read.
    """
    return _last_lines(_end_of(log))


def _end_of(log: Path, start: int = 0) -> bytes:
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - LOG_TAIL_BYTES))
        return file.read()


def _last_lines(written: bytes) -> str:
    return "\n".join(written.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def answered(processes: Sequence[WorkerProcess], timeout_s: float) -> list[WorkerProcess]:
    """Wait until a process has sent a message, has ended or sends no heartbeats; return all such processes.

    Ended and silent processes are checked at the end of the wait: a child of an ended process may keep its channel
    open.
    """
    ready = wait([process.connection for process in processes], timeout_s)
    return [one for one in processes if one.connection in ready or one.ended() or one.silent()]


def end_all(processes: Sequence[WorkerProcess]) -> None:
    """End processes: send SIGHUP, wait a short time for all of them, send SIGKILL."""
    for process in processes:
        process.signal(signal.SIGHUP)
        # A stopped process cannot act on SIGHUP.
        process.signal(signal.SIGCONT)
    deadline = time.monotonic() + END_GRACE_S
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.release()
