"""Bound the processor time of code that a model brings: a chat template may loop for ever."""

from __future__ import annotations

import gc
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeoutError` in the block when this process has used so much processor time in it.

    Waiting does not count, so a busy machine changes nothing. In the main thread only: signals reach no other one,
    and there is no limit there. A call into C ends before it is interrupted. Python swallows what is raised in a
    destructor or in a callback of its garbage collector: so the collector rests, and the error is raised again
    every ``seconds`` until it gets through.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: object) -> NoReturn:
        del number, frame
        raise TimeoutError(f"it did not end within {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, expire)
    collecting = gc.isenabled()
    gc.disable()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
        if collecting:
            gc.enable()
