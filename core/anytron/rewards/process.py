"""One reward process as the driver sees it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import TYPE_CHECKING

from anytron.errors import DataError
from anytron.files import open_to_append
from anytron.rewards.answer import Answer, Failure
from anytron.rewards.worker import STACK_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.schema import RewardSection
    from anytron.rewards.sample import Sample

PROGRAM = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "from anytron.rewards.worker import main; main(*map(int, sys.argv[1:]))"
)
"""The current directory is no place to import from: a ``logging.py`` that lies there would be run."""
STACKS_S = 0.3
"""How long a process that takes too long gets to write its stacks."""
END_S = 2.0
"""How long a process that has closed its channel gets to end, so that one can say how."""
IO_TIMEOUT_S = 60.0
"""How long a process may take to read a message, or to write the rest of one."""
LOG_TAIL_LINES = 30
"""Lines of its log that a failure shows."""


class RewardProcess:
    """Calls a reward function in an interpreter of its own, the leader of a session of its own.

    One call at a time: :meth:`give`, then :meth:`take` until there is an answer.

    Args:
        name: The reward's, for people.
        section: What to call.
        key: Where it stands in the configuration.
        log: Takes all that the process writes; appended to.
        start_timeout_s: Seconds until it must have found the function.

    Attributes:
        connection: Ready to be read when :meth:`take` has something to do.
    """

    def __init__(self, name: str, section: RewardSection, key: str, log: Path, start_timeout_s: float) -> None:
        self._name = name
        self._key = key
        self._log = log
        self._timeout_s = section.timeout_s
        self._start_timeout_s = start_timeout_s
        self._ready = False
        self._given: Sequence[Sample] | None = None
        self._at: int | None = None
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(IO_TIMEOUT_S), 0)  # a stopped process neither reads nor writes
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = Connection(ours.detach())
        lifeline, self._lifeline = os.pipe()
        with theirs, os.fdopen(open_to_append(log), "ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,
            )
        os.close(lifeline)
        start = {
            "function": section.function,
            "key": key,
            "options": section.model_dump(mode="json")["options"],
            "memory_gib": section.memory_gib,
            "sys_path": sys.path,
        }
        self._send(json.dumps(start).encode())
        self.deadline = monotonic() + start_timeout_s

    def give(self, samples: Sequence[Sample]) -> None:
        """Let the function be called with these samples, as soon as the process is up."""
        self._given = samples
        self._at = None
        if self._ready:
            self._call()

    def take(self) -> Answer | None:
        """Take what has come, or find that the time is over; None if there is no answer yet.

        An answer that cannot come any more is one, with its reason; the process has ended then.

        Raises:
            DataError: The process could not start, or cannot read the samples.
        """
        try:
            message = json.loads(self.connection.recv_bytes()) if self.connection.poll() else None
        except (EOFError, OSError, ValueError):
            return self._lost()
        if message is None:
            return self._overdue() if monotonic() >= self.deadline else None
        if "values" in message:
            self._given = None
            found = Answer.from_json(message)
            if any(failure.ends for failure in found.failures):
                self.end()
            return found
        if "unreadable" in message:
            raise DataError(
                "A reward process cannot read a prompt's data.",
                where=f"reward {self._name}",
                why=message["unreadable"],
                fix="let Prompt.data hold plain values, or objects of an importable module",
            )
        if "at" in message:
            self._at = message["at"]
            self.deadline = monotonic() + self._timeout_s
        else:
            self._ready = True
            if self._given is not None:
                self._call()
        return None

    @property
    def ended(self) -> bool:
        """Whether the process is gone; another one must take its place."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self.connection.close()

    def _call(self) -> None:
        assert self._given is not None
        try:
            frame = pickle.dumps(self._given, protocol=5)
        except Exception as error:
            raise DataError(
                "A prompt's data cannot be sent to a reward process.",
                where=f"reward {self._name}",
                why=f"{type(error).__name__}: {error}",
                fix="let Prompt.data hold plain values, or objects of an importable module",
            ) from error
        self._send(frame)
        self.deadline = monotonic() + self._timeout_s

    def _send(self, frame: bytes) -> None:
        # What became of a process that does not read is found by take().
        with suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            self.connection.send_bytes(frame)

    def _overdue(self) -> Answer:
        os.kill(self._process.pid, STACK_SIGNAL)
        sleep(STACKS_S)
        stacks = self._tail()
        self.end()
        if not self._ready:
            raise self._never_started(f"it did not find the function within {self._start_timeout_s:g} s\n{stacks}")
        return Answer.failed(
            Failure(
                "A reward function took too long.",
                f"more than {self._timeout_s:g} s for a sample; where it stood, at the end of {self._log}:\n{stacks}",
                f"if it is only slow, raise {self._key}.timeout_s",
                self._at,
            )
        )

    def _lost(self) -> Answer:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        status = self._process.poll()
        if status is None:
            fate = "it closed its channel and still runs"
        elif status < 0:
            fate = f"it was killed by {signal.Signals(-status).name}"
        else:
            fate = f"it exited with status {status}"
        tail = self._tail()
        self.end()
        if not self._ready:
            raise self._never_started(f"{fate}\n{tail}".rstrip())
        return Answer.failed(
            Failure(
                "A reward process died.",
                f"{fate}; the last lines of {self._log}:\n{tail}" if tail else f"{fate}; it wrote nothing",
                "SIGKILL is mostly the kernel's answer to a lack of memory: set rewards[].memory_gib"
                if status == -signal.SIGKILL
                else "a program that the function tries out belongs into a process of its own",
                self._at,
            )
        )

    def _never_started(self, why: str) -> DataError:
        return DataError(
            "A reward process could not start.",
            where=f"{self._key} ({self._name})",
            why=why,
            fix="import less, or raise memory_gib if it is set; loading a model belongs into the first call",
        )

    def _tail(self) -> str:
        """The last lines that this process wrote."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])
