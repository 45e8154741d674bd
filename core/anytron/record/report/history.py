"""Read the records that a run appends to its files, and keep its metrics by name instead of by step."""

from __future__ import annotations

import math
import os
from array import array
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from anytron.config.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Tail:
    """Reads the new records of a growing file. A line is read once it is complete.

    Args:
        path: The file; it need not exist yet.

    Attributes:
        broken: Number of complete lines that were not JSON objects.
        cut_short: Whether the file ended in the middle of a line when it was last read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._last = b""
        self.broken = 0
        self.cut_short = False

    def read(self) -> Iterator[dict[str, Any] | None]:
        """Yield the records that are new since the last call; None = all records that were yielded before are invalid.

        None comes first if the file was replaced, or if a resumed run has cut it back: then the last line that was read
        is no longer there, and all records are yielded again.
        """
        if not self._path.is_file():  # a pipe would be waited for
            return
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            file.seek(self._offset - len(self._last))
            if self._identity != (found.st_dev, found.st_ino) or file.read(len(self._last)) != self._last:
                self._identity, self._offset, self._last, self.broken = (found.st_dev, found.st_ino), 0, b"", 0
                yield None
                file.seek(0)
            self.cut_short = False
            for line in file:
                if not line.endswith(b"\n"):
                    self.cut_short = True
                    return
                self._offset, self._last = self._offset + len(line), line
                value = parsed(line)
                if value is None:
                    self.broken += bool(line.strip())
                else:
                    yield value


def parsed(line: bytes) -> dict[str, Any] | None:
    """Read a line as a JSON object; None if it is not one."""
    try:
        return parse_object(line.decode(errors="replace"))
    except ValueError:
        return None


def step_of(record: dict[str, Any]) -> int | None:
    """Return the step of a record; None if it has none."""
    step = record.get("step")
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


class Series:
    """One metric over the steps that have it.

    Attributes:
        steps: Training steps, rising.
        values: Values of the metric, one for each step; NaN and infinity are kept.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def add(self, step: int, value: float) -> None:
        """Append a value of a later step."""
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Forget this step and all later ones."""
        kept = bisect_left(self.steps, step)
        del self.steps[kept:], self.values[kept:]

    def _sections(self, points: int) -> list[tuple[int, int]]:
        """For each section of a series that is too long, the place of its first value, and of the first one behind."""
        parts = max((points - 2) // 3, 1) if len(self.steps) > points else 0
        return list(pairwise(number * len(self.steps) // parts for number in range(parts + 1))) if parts else []

    def section(self, points: int) -> int:
        """Return the largest number of steps in a section of :meth:`thinned`; 1 = the series is returned as it is."""
        return max((self.steps[end - 1] - self.steps[begin] + 1 for begin, end in self._sections(points)), default=1)

    def thinned(self, points: int) -> Series:
        """Return a series of about ``points`` points: the lowest, the highest and the first non-finite of each section.

        Sections are equal parts of the series. The first and the last value are kept, too.

        Args:
            points: Number of points, at least 4; a series with no more points is returned as it is.
        """
        sections = self._sections(points)
        if not sections:
            return self
        kept = Series()
        chosen = {0, len(self.steps) - 1}
        for begin, end in sections:
            chosen.update(_extremes(self.values, begin, end))
        for place in sorted(chosen):
            kept.add(self.steps[place], self.values[place])
        return kept


def _extremes(values: Sequence[float], begin: int, end: int) -> Iterator[int]:
    finite = [place for place in range(begin, end) if math.isfinite(values[place])]
    if len(finite) < end - begin:
        yield next(place for place in range(begin, end) if not math.isfinite(values[place]))
    if finite:
        yield min(finite, key=values.__getitem__)
        yield max(finite, key=values.__getitem__)


class History:
    """All metrics of a run. Steps that a resumed run repeats replace the earlier ones.

    Attributes:
        series: Series by metric name, without ``step``.
        steps: All steps in rising order.
        recent: Metrics of the last step, by name.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.series: dict[str, Series] = {}
        self.steps = array("q")
        self.recent: dict[str, float] = {}

    def add(self, record: dict[str, Any]) -> bool:
        """Add a record of ``metrics.jsonl``, without values that are not numbers; return False if it has no step."""
        step = step_of(record)
        if step is None:
            return False
        if step <= self.last:
            del self.steps[bisect_left(self.steps, step) :]
            for series in self.series.values():
                series.cut(step)
        self.steps.append(step)
        self.recent = {name: number for name in record if (number := number_of(record[name])) is not None}
        for name, value in self.recent.items():
            if name in self.series:
                self.series[name].add(step, value)
            elif name != "step":
                self.series[name] = Series()
                self.series[name].add(step, value)
        return True

    @property
    def last(self) -> int:
        """The last step; 0 = there is none."""
        return self.steps[-1] if self.steps else 0

    def at(self, step: int) -> dict[str, float]:
        """Return the metrics of a step."""
        places = {name: bisect_left(series.steps, step) for name, series in self.series.items()}
        return {
            name: self.series[name].values[place]
            for name, place in places.items()
            if self.series[name].steps[place : place + 1] == array("q", [step])
        }

    def values(self, name: str) -> list[float]:
        """The finite values of a metric; empty if there are none."""
        return [value for value in self.series.get(name, Series()).values if math.isfinite(value)]


def number_of(value: Any) -> float | None:
    """Return a value as a float; None if it is not a number."""
    if type(value) is float:  # nearly all of them
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    return math.fsum(values) / len(values) if values else math.nan


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return the moving average: each value averaged with those before it, at most ``width`` values in all."""
    return [mean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
