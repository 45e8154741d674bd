"""Find the sinks of a run, send each step's metrics to all of them on threads, and report steps that were not written.

Whatever a sink does, the run neither waits for it nor fails with it.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import deque
from functools import partial, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from anytron.base.components import METRIC_SINKS, component_names, load_component
from anytron.base.errors import ConfigError, did_you_mean
from anytron.config.diagnostics import Diagnostic
from anytron.config.dump import without_secrets
from anytron.config.imports import resolve
from anytron.config.options import model_diagnostics
from anytron.record.sinks.contract import CLOSE, MADE, SINK, WRITE, WRITE_VALIDATION, MetricSink, SinkRun
from anytron.record.tracking.claim import SINKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from anytron.base.functions import Called, Fault
    from anytron.config.running import SinkSection
    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Progress
    from anytron.record.tracking.run_directory import RunDirectory


def sink_name(section: SinkSection) -> str:
    """Return the short name of a sink: its registered name, or the name of its class."""
    return section.sink.rpartition(":")[2]


def load_sink(section: SinkSection, key: str) -> type[MetricSink]:
    """Find the class of a sink. The library that it needs is not imported.

    Args:
        section: The sink's section of the configuration.
        key: Key of the section, for the error.

    Raises:
        ConfigError: No sink has the name, or the named object is not a sink.
    """
    where = f"{key}.sink"
    if ":" in section.sink:
        found: object = resolve(section.sink, SINK, key=where)
    elif section.sink in (known := component_names(METRIC_SINKS)):
        found = load_component(METRIC_SINKS, section.sink, where)
        SINK.check(found, where)
    else:
        raise ConfigError(
            f"There is no sink {section.sink!r}.",
            where=where,
            why=f"the installed sinks are: {', '.join(known)}",
            fix=did_you_mean(section.sink, known)
            or "set one of these names, or a class as 'module:Class' or 'file.py:Class'",
        )
    if not (isinstance(found, type) and issubclass(found, MetricSink)):
        raise ConfigError(
            f"{section.sink} is not a sink of metrics.",
            where=where,
            why="it is not a subclass of anytron.record.sinks.MetricSink",
            fix="make it a subclass, as docs/how-to/write-a-metric-sink.md shows",
        )
    return found


def sink_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find sinks that do not exist, whose package is missing, whose options are wrong, or that are named twice."""
    names: list[str] = []
    for index, section in enumerate(config.tracking.sinks):
        key = f"tracking.sinks.{index}"
        try:
            sink = load_sink(section, key)
        except ConfigError as error:
            yield Diagnostic("error", f"{key}.sink", f"{error.what.removesuffix('.')}; {error.why}", error.fix)
            continue
        for package in sink.packages:
            if importlib.util.find_spec(package) is None:
                why = f"{section.sink} needs the package {package}, which is not installed"
                yield Diagnostic("error", f"{key}.sink", why, sink.install or f"install {package}")
        yield from model_diagnostics(sink.options_model, section.options, f"{key}.options")
        if sink_name(section) in names:
            why = f"two sinks have the name {sink_name(section)}, and would write into the same directory"
            yield Diagnostic("error", f"{key}.sink", why, "remove one of them")
        names.append(sink_name(section))


QUEUED = 1000
"""Largest number of steps that wait for a slow sink; further steps are dropped until there is room."""


class SinkThread:
    """A sink, its thread, and the steps that wait to be written.

    The thread is a daemon: a sink that never returns does not keep the process alive.

    Args:
        name: Name of the sink, for messages.
        open_sink: Function that makes the sink; called on the sink's thread.
        queued: Number of steps that may wait.

    Attributes:
        name: Name of the sink.
        place: Where its metrics can be viewed, once known.
        failure: The first error; None = no error so far.
        failed: Number of steps for which the sink raised; all steps if the sink could not be made.
        dropped: Number of steps that were dropped because the queue was full.
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
        """Number of steps that are still queued."""
        return len(self._waiting)

    def put(self, step: int, metrics: Mapping[str, float], *, validation: bool = False) -> None:
        """Queue a step, or a validation, for the sink. Returns at once."""
        with self._changed:
            if not self._thread.is_alive():
                self.failed += 1
            elif len(self._waiting) >= self._queued:
                self.dropped += 1
            else:
                self._waiting.append((validation, step, metrics))
                self._changed.notify()

    def begin_close(self) -> None:
        """Ask the sink to write the queued steps and to close. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait until the sink is closed; return whether it is."""
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
        """Call the sink and return whether the call succeeded. :attr:`failure` keeps the first error."""
        fault: Fault | None
        try:
            gave.append(found := function(*given))
            fault = called.returned_async(function, found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code
            fault = called.raised(error, function)
        self.failure = self.failure or fault
        return fault is None


LONGEST = 250
"""Largest number of characters in the name of a metric; MLflow's limit."""
KEPT = "the run goes on, and metrics.jsonl has every step"


class MetricSinks:
    """The sinks of ``tracking.sinks``, each on a thread of its own. A context manager: leaving closes them.

    A sink cannot stop or delay the run. Its first exception is shown as a warning; all failures are counted. If a slow
    sink's queue is full, steps are dropped and counted. Closing takes at most ``tracking.close_timeout_s``.

    Args:
        config: Configuration of the run.
        run: Directory of the run; warnings are also written to its log.
        progress: Shows the warnings to the user.
        after: The step after which a resumed run continues; None for a new run.
    """

    def __init__(self, config: RunConfig, run: RunDirectory, progress: Progress, *, after: int | None) -> None:
        self._run, self._progress = run, progress
        self._timeout_s = config.tracking.close_timeout_s
        shown = without_secrets(config.model_dump(mode="json")) if config.tracking.sinks else {}
        self._threads = [
            SinkThread(sink_name(section), self._opener(section, index, shown, after))
            for index, section in enumerate(config.tracking.sinks)
        ]
        self._told: set[tuple[str, str]] = set()

    def write(self, metrics: Mapping[str, float], *, validation: bool = False) -> None:
        """Pass the metrics of a step, or of a validation, to every sink. Returns at once."""
        numbers = MappingProxyType({_printable(name): _as_float(value) for name, value in metrics.items()})
        for thread in self._threads:
            thread.put(int(metrics["step"]), numbers, validation=validation)
        self._tell()

    def close(self) -> None:
        """Close all sinks at the same time, and warn of the steps that they did not write."""
        deadline = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.begin_close()
        ended = {thread.name: thread.join(deadline - time.monotonic()) for thread in self._threads}
        self._tell()
        for thread in self._threads:
            unwritten = thread.waiting
            if not ended[thread.name]:
                self._warn(
                    f"the sink {thread.name} has not closed within {self._timeout_s:g} s (tracking.close_timeout_s) "
                    "and is abandoned"
                )
            if lost := thread.failed + thread.dropped + unwritten:
                self._warn(
                    f"the sink {thread.name} lacks {lost} step{'s' if lost > 1 else ''}: {thread.failed} failed, "
                    f"{thread.dropped} were dropped, {unwritten} were still waiting; metrics.jsonl has every step"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _opener(
        self, section: SinkSection, index: int, config: Mapping[str, object], after: int | None
    ) -> Callable[[], MetricSink]:
        """Return a function that makes a sink. Its class is found here: it was checked before the run."""
        sink = load_sink(section, f"tracking.sinks.{index}")
        directory = self._run.path / SINKS / sink_name(section)
        run = SinkRun(self._run.path.name, directory, config, after)
        options = None if sink.options_model is None else sink.options_model.model_validate(section.options)

        @wraps(sink, updated=())
        def made() -> MetricSink:
            directory.mkdir(parents=True, exist_ok=True)
            return sink(run, options)

        return made

    def _tell(self) -> None:
        for thread in self._threads:
            if thread.place:
                self._once(thread, "place", partial(self._progress.note, f"{thread.name}: {thread.place}"))
            if thread.failure is not None:
                self._once(thread, "failure", partial(self._warn_of, thread.name, thread.failure))
            if thread.dropped:
                text = f"the sink {thread.name} is slower than the run: steps are dropped; {KEPT}"
                self._once(thread, "dropped", partial(self._warn, text))

    def _once(self, thread: SinkThread, kind: str, tell: Callable[[], None]) -> None:
        if (thread.name, kind) not in self._told:
            self._told.add((thread.name, kind))
            tell()

    def _warn_of(self, name: str, fault: Fault) -> None:
        headline, _, frames = fault.why.partition("\n")
        self._warn(f"the sink {name} failed: {headline}; {KEPT}")
        self._run.log(f"{fault.what} {fault.fix}\n{frames}".rstrip())

    def _warn(self, text: str) -> None:
        self._progress.warn(text)
        self._run.log(f"warning: {text}")


def _printable(name: str) -> str:
    """Write a name, which may come from an environment or a reward, with characters that every service takes."""
    return "".join(one if one.isprintable() else "_" for one in name[:LONGEST])


def _as_float(value: float) -> float:
    """Turn a number into a float; an integer that is too large for one into infinity."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
