"""The thread of a sink: whatever the sink does, the run neither waits for it nor fails with it."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from anytron.record.sinks.contract import CLOSE, MADE, WRITE, WRITE_VALIDATION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.base.functions import Called, Fault
    from anytron.record.sinks.contract import MetricSink

QUEUED = 1000
"""Steps that wait for a slow sink, at most: later ones are dropped until there is room."""


class SinkThread:
    """A sink and the steps that wait for it.

    The thread is a daemon: a sink that never returns does not keep the process.

    Args:
        name: The sink's, for people.
        open_sink: Makes it, on its thread.
        queued: Steps that may wait.

    Attributes:
        name: As given.
        place: Where its metrics are seen, once it says so.
        failure: What went wrong first; None = nothing so far.
        failed: Steps for which it raised, and all that come to one that could not be made.
        dropped: Steps that found the queue full.
    """

    def __init__(self, name: str, open_sink: Callable[[], MetricSink], queued: int = QUEUED) -> None:
        self.name = name
        self.place = ""
        self.failure: Fault | None = None
        self.failed = self.dropped = 0
        self._open_sink, self._queued = open_sink, queued
        self._waiting: deque[tuple[bool, int, Mapping[str, float]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"anytron-sink-{name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Steps that it has not taken."""
        return len(self._waiting)

    def put(self, step: int, metrics: Mapping[str, float], *, validation: bool = False) -> None:
        """Let the sink write a step, or a validation, when it gets to it. Returns at once."""
        with self._changed:
            if not self._thread.is_alive():
                self.failed += 1
            elif len(self._waiting) >= self._queued:
                self.dropped += 1
            else:
                self._waiting.append((validation, step, metrics))
                self._changed.notify()

    def begin_close(self) -> None:
        """Ask it to write what waits, and to close. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait for that; say whether it is done."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        opened: list[MetricSink] = []
        if not self._did(MADE, self._open_sink, opened):
            with self._changed:
                self.failed += len(self._waiting)
                self._waiting.clear()
            return
        (sink,) = opened
        self.place = sink.place
        while (taken := self._next()) is not None:
            validation, step, metrics = taken
            called, method = (WRITE_VALIDATION, sink.write_validation) if validation else (WRITE, sink.write)
            if not self._did(called, method, [], step, metrics):
                self.failed += 1  # the next step may pass
        self._did(CLOSE, sink.close, [])

    def _next(self) -> tuple[bool, int, Mapping[str, float]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None

    def _did(self, called: Called, function: Callable[..., Any], gave: list[Any], *given: object) -> bool:
        """Call the sink, whatever it does; say whether it did it. :attr:`failure` keeps the first fault."""
        fault: Fault | None
        try:
            gave.append(found := function(*given))
            fault = called.returned_async(function, found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code
            fault = called.raised(error, function)
        self.failure = self.failure or fault
        return fault is None
