"""What interrupts a run: signals that ask it to end, and processes that are lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.errors import LostDirectoryError, WorkerError
from anytron.base.files import open_to_append
from anytron.record.tracking.claim import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from anytron.base.errors import AnytronError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that schedulers send before they end a job."""


class Restarts:
    """Decides whether a run goes on after a process was lost, and records each loss.

    Processes that are lost in a row are counted. A step that is finished for the first time resets the count. A step
    that is repeated after a restart does not: a cause that ends every attempt at the same step cannot restart the run
    for ever.

    Args:
        limit: How many processes may be lost in a row without ending the run (``trainer.max_restarts``).
        output_dir: The run's directory.
        tell: Called with a message about each lost process after which the run goes on.

    Attributes:
        has_lost: Whether a process was lost in this run; the run's directory then holds ``run.json``.
    """

    def __init__(self, limit: int, output_dir: Path, tell: Callable[[str], None]) -> None:
        self._limit, self._tell = limit, tell
        self._file = output_dir / LOSSES
        self._in_a_row = 0
        self._furthest = 0
        self.has_lost = False

    def finished(self, step: int) -> None:
        """Record that a step is done."""
        if step > self._furthest:
            self._furthest, self._in_a_row = step, 0

    def lost(self, error: AnytronError, then: str) -> None:
        """Record that a process was lost.

        Args:
            error: The error that tells which process was lost, and how.
            then: Description of what the run does next.

        Raises:
            WorkerError: More than ``limit`` processes were lost in a row.
            LostDirectoryError: The run's directory no longer exists.
        """
        goes_on = self._in_a_row < self._limit
        self._in_a_row += 1
        self.has_lost = True
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "after_step": self._furthest,
            "in_a_row": self._in_a_row,
            "lost": error.what,
            "where": error.where,
            "why": error.why,
            "then": then if goes_on else "the run ends",
        }
        try:
            with os.fdopen(open_to_append(self._file), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except FileNotFoundError as gone:
            raise LostDirectoryError(
                "The output directory was removed or replaced.",
                where=f"trainer.output_dir = {self._file.parent}",
                why=f"{gone}; before that, a process was lost: {error.headline}",
                fix="start the run again with resume=auto",
            ) from error
        if goes_on:
            self._tell(f"{error.what} {then[0].upper()}{then[1:]} ({self._in_a_row} of {self._limit} in a row).")
            return
        advice = f"this was loss number {self._in_a_row} in a row without a completed step: see {self._file}"
        fix = [error.fix, *([advice] if self._limit else [])]
        raise WorkerError(error.what, where=error.where, why=error.why, fix="; ".join(filter(None, fix))) from None


class StopRequested(BaseException):
    """A signal asks the run to end. Not an ``Exception``, so that only the run's checkpointing handles it."""


class StopSignals:
    """Notes the first signal that asks the run to end; at the second the process ends at once.

    A context manager: leaving restores the handlers that were there before. A signal that the process ignores (SIGHUP
    under ``nohup``) stays ignored.

    Args:
        handled: False = change no signal handlers.

    Attributes:
        received: Name of the first signal; None until one is received.
    """

    def __init__(self, *, handled: bool) -> None:
        # Python lets only the main thread set handlers.
        self._handled = handled and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, signal.Handlers | object] = {}
        self._raises = False
        self.received: str | None = None

    @contextlib.contextmanager
    def interrupt(self) -> Iterator[None]:
        """Raise :class:`StopRequested` in the ``with`` block when a signal comes, or at once if one has come before."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise :class:`StopRequested` if a signal was received."""
        if self.received is not None:
            raise StopRequested

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS if self._handled else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            raise SystemExit(128 + number)
        self.received = signal.Signals(number).name
        if self._raises:
            raise StopRequested
