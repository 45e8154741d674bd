"""Give the metrics of each step to all sinks of a run, and tell what did not arrive."""

from __future__ import annotations

import time
from functools import partial, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.config.secrets import without_secrets
from anytron.record.sinks.contract import SinkRun
from anytron.record.sinks.loading import load_sink, sink_name
from anytron.record.sinks.thread import SinkThread
from anytron.record.tracking.claim import SINKS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.base.functions import Fault
    from anytron.config.running import SinkSection
    from anytron.config.schema import RunConfig
    from anytron.record.sinks.contract import MetricSink
    from anytron.record.tracking.progress import Progress
    from anytron.record.tracking.run_directory import RunDirectory

LONGEST = 250
"""Characters of a metric's name, as MLflow has it."""
KEPT = "the run goes on, and metrics.jsonl has every step"


class MetricSinks:
    """The sinks of ``tracking.sinks``, each on a thread of its own. A context manager: leaving closes them.

    Nothing that a sink does reaches the run: what it raises is told once, as a warning, and counted; what a slow one
    has no room for is dropped and counted; closing ends after ``tracking.close_timeout_s``.

    Args:
        config: The run.
        run: Its directory, whose log has every warning.
        progress: Shows them.
        after: The run continues after this step; None for a new one.
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
        """Give the metrics of a step, or of a validation, to every sink. Returns at once."""
        numbers = MappingProxyType({_printable(name): _as_float(value) for name, value in metrics.items()})
        for thread in self._threads:
            thread.put(int(metrics["step"]), numbers, validation=validation)
        self._tell()

    def close(self) -> None:
        """Close all of them at the same time, and say what none of them has got."""
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
