"""Redirect streams, events and profiler ranges.

Streams and events must be classes, because other code uses them in annotations and in ``isinstance``. If the runtime
has no streams, everything runs in order, and waiting does nothing.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from anytron.device.runtime import DeviceRuntime


class Scheduler:
    """The functions of ``torch.cuda`` about streams; as in torch, each thread has its own current stream."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.stream_class: type[Stream] = type("Stream", (Stream,), {"scheduler": self})
        self.event_class: type[Event] = type("Event", (Event,), {"scheduler": self})
        self._default: Stream | None = None
        self._thread = threading.local()

    def default_stream(self, device: Any = None) -> Stream:
        """Return the stream that is current before :meth:`set_stream` is called.

        The runtime is asked at the first use, not earlier, because asking initialises the device, and each rank must
        choose its device before.
        """
        del device
        if self._default is None:
            self._default = self.stream_class.wrap(self.runtime.current_stream())
        return self._default

    def current_stream(self, device: Any = None) -> Stream:
        """Return this thread's current stream."""
        del device
        current: Stream | None = getattr(self._thread, "stream", None)
        return self.default_stream() if current is None else current

    def set_stream(self, stream: Stream | None) -> None:
        """Make ``stream`` current in this thread; None changes nothing."""
        if stream is None:
            return
        self.default_stream()  # while it is still the current one
        if stream.native is not None:
            stream.native.__enter__()
        self._thread.stream = stream

    def leave_stream(self, stream: Stream, before: Stream) -> None:
        """Make ``before`` current again, at the end of a block in which ``stream`` was current."""
        self._thread.stream = before
        if stream.native is not None:
            stream.native.__exit__(None, None, None)

    def stream(self, stream: Stream | None) -> StreamContext:
        """Return a context in which ``stream`` is current."""
        return StreamContext(stream)

    def is_current_stream_capturing(self) -> bool:
        """Return False: no graphs are captured."""
        return False


class Stream:
    """Replace ``torch.cuda.Stream``; ``native`` is the runtime's stream, None if the runtime has no streams."""

    scheduler: ClassVar[Scheduler]
    native: Any

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        del device, priority
        self.native = self.scheduler.runtime.new_stream()

    @classmethod
    def wrap(cls, native: Any) -> Stream:
        """Return a stream object for an existing native stream."""
        stream = cls.__new__(cls)
        stream.native = native
        return stream

    def synchronize(self) -> None:
        """Wait until this stream has done everything in its queue."""
        if self.native is None:
            self.scheduler.runtime.synchronize()
        else:
            self.native.synchronize()

    def query(self) -> bool:
        """Whether this stream has done everything in its queue."""
        return True if self.native is None else self.native.query()

    def wait_stream(self, stream: Stream) -> None:
        """Let this stream's next work wait for everything queued in ``stream``."""
        if self.native is not None:
            self.native.wait_stream(stream.native)

    def wait_event(self, event: Event) -> None:
        """Let this stream's next work wait for ``event``."""
        if self.native is not None and event.native is not None:
            self.native.wait_event(event.native)

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, in this stream."""
        event = event or self.scheduler.event_class()
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        """The stream's handle; 0 (CUDA's default stream) if the runtime has none."""
        return int(getattr(self.native, "stream_id", 0))


class Event:
    """Replace ``torch.cuda.Event``. An event that measures time waits for the device and reads the host's clock."""

    scheduler: ClassVar[Scheduler]

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        del blocking, interprocess
        self._measures = enable_timing
        self.native: Any = None
        self._recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the current end of ``stream``'s queue (default: the current stream's)."""
        native = (stream or self.scheduler.current_stream()).native
        if self._measures:
            self.scheduler.runtime.synchronize()
        else:
            self.native = None if native is None else native.record_event()
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Let ``stream`` (default: the current one) wait for this event."""
        (stream or self.scheduler.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether the stream has passed the recorded point."""
        return True if self.native is None else self.native.query()

    def synchronize(self) -> None:
        """Wait until the stream has passed the recorded point."""
        if self.native is not None:
            self.native.synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two recorded events."""
        if self._recorded_s is None or end_event._recorded_s is None:
            raise ValueError("both events must be recorded before elapsed_time() is called")
        return (end_event._recorded_s - self._recorded_s) * 1e3


class StreamContext:
    """Replace ``torch.cuda.StreamContext``; with None as its stream, the context changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = self.stream.scheduler.current_stream()
            self.stream.scheduler.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.scheduler.leave_stream(self.stream, self._before)


def substitutions(runtime: DeviceRuntime) -> Iterator[Substitution]:
    """Replace ``Stream``, ``Event``, ``StreamContext``, the functions about the current stream, and NVTX ranges."""
    yield from _range_substitutions(runtime)
    scheduler = Scheduler(runtime)
    yield Substitution(torch.cuda, "Stream", scheduler.stream_class)
    yield Substitution(torch.cuda, "Event", scheduler.event_class)
    yield Substitution(torch.cuda, "StreamContext", StreamContext)
    for name in ("current_stream", "default_stream", "is_current_stream_capturing", "set_stream", "stream"):
        yield Substitution(torch.cuda, name, getattr(scheduler, name))


def _range_substitutions(runtime: DeviceRuntime) -> Iterator[Substitution]:
    """Replace nested ranges and marks of ``torch.cuda.nvtx``; each thread has its own nesting."""
    nesting = threading.local()

    def open_ranges() -> list[AbstractContextManager[None]]:
        ranges: list[AbstractContextManager[None]] = vars(nesting).setdefault("ranges", [])
        return ranges

    def range_push(msg: str) -> int:
        scope = runtime.profiler_range(msg)
        scope.__enter__()
        open_ranges().append(scope)
        return len(open_ranges()) - 1

    def range_pop() -> int:
        if not open_ranges():
            return -1  # as NVTX itself answers
        open_ranges().pop().__exit__(None, None, None)
        return len(open_ranges())

    @contextmanager
    def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:  # noqa: A001 - takes nvtx.range's place
        range_push(msg.format(*args, **kwargs))
        try:
            yield
        finally:
            range_pop()

    def mark(msg: str) -> None:
        with runtime.profiler_range(msg):
            pass

    for substitute in (range_push, range_pop, range, mark):
        yield Substitution(torch.cuda.nvtx, substitute.__name__, substitute)
