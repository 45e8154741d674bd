"""Signals that ask a run to end: what schedulers send before they take the machine away."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopRequested(BaseException):
    """A signal asks the run to end. Not an ``Exception``: nothing but the run's checkpoints handles it."""


class StopSignals:
    """Notes the first signal that asks the run to end; at the second the process ends at once.

    A context manager: leaving restores the handlers that were there before. A signal that the process ignores (SIGHUP
    under ``nohup``) stays ignored.

    Args:
        handled: False = leave all signals as they are.

    Attributes:
        received: The first signal's name; None until one has come.
    """

    def __init__(self, *, handled: bool) -> None:
        # Python lets only the main thread set handlers.
        self._handled = handled and threading.current_thread() is threading.main_thread()
        self._before: dict[signal.Signals, signal.Handlers | object] = {}
        self._raises = False
        self.received: str | None = None

    @contextlib.contextmanager
    def interrupt(self) -> Iterator[None]:
        """Let signals end the ``with`` block: it raises :class:`StopRequested` as soon as one comes, or has come."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise :class:`StopRequested` if a signal has come."""
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
