"""Limit the CPU time of code from a model directory: a chat template may loop for ever."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from anytron.base.garbage import no_collections

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeoutError` in the ``with`` block when this process has used ``seconds`` of CPU time in it.

    Waiting does not count, so the load of the machine does not matter. The limit works in the main thread only, because
    other threads receive no signals. A call into C is not interrupted before it returns. Python ignores exceptions in
    destructors and in callbacks of its garbage collector: so the collector is off in the block, and the error is raised
    every ``seconds`` again until it leaves the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: object) -> NoReturn:
        del number, frame
        raise TimeoutError(f"it did not end within {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, expire)
    with no_collections():
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)
