"""The thread of a sink: whatever the sink does, the run neither waits for it nor fails with it."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.sinks.contract import MetricSink

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
        failure: What it raised first, in words; None = nothing so far.
        failed: Steps for which it raised, and all that come to one that could not be made.
        dropped: Steps that found the queue full.
    """

    def __init__(self, name: str, open_sink: Callable[[], MetricSink], queued: int = QUEUED) -> None:
        self.name = name
        self.place = ""
        self.failure: str | None = None
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
        try:
            sink = self._open_sink()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code; told by who reads `failure`
            self._note(error)
            with self._changed:
                self.failed += len(self._waiting)
                self._waiting.clear()
            return
        self.place = sink.place
        while (taken := self._next()) is not None:
            validation, step, metrics = taken
            try:
                (sink.write_validation if validation else sink.write)(step, metrics)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - likewise; the next step may pass
                self.failed += 1
                self._note(error)
        try:
            sink.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - likewise
            self._note(error)

    def _next(self) -> tuple[bool, int, Mapping[str, float]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None

    def _note(self, error: BaseException) -> None:
        if self.failure is None:
            said = str(error).strip().splitlines()
            self.failure = ": ".join([type(error).__name__, *said[:1]])
