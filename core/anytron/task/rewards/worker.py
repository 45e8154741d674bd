"""A reward process: it calls one reward function, for the driver, until the driver is gone.

Importing this module does not import torch; the function may import it.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from typing_extensions import Self

from anytron.task.isolation.confined import confine
from anytron.task.isolation.progress import Progress
from anytron.task.isolation.worker import calls, enter
from anytron.task.rewards.answer import answer
from anytron.task.rewards.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def main(channel: int, lifeline: int) -> None:
    """Call the function that the driver names with every list of samples that the driver sends.

    Arguments as for :func:`anytron.task.isolation.worker.enter`.
    """
    connection, start = enter(channel, lifeline)

    from anytron.task.rewards.registered import made

    function = made(start["function"], start["options"], start["key"])
    if hasattr(function, "check_machine"):
        function.check_machine()  # imports what it needs
    if getattr(function, "confined", False):
        confine()
    progress = Progress(start["progress"])
    for samples, give in calls(connection, start):
        with WatchedSamples(samples, progress.at) as watched:
            found = answer(function, watched)
        give(found.as_json())
        if any(failure.ends for failure in found.failures):
            return


class WatchedSamples(list["Sample"]):
    """A list of samples that reports each time a sample is read, so that the driver knows how far the function is.

    The time-out counts from the last read, and a function that hangs or dies was scoring the last sample read.

    Args:
        samples: The items of the list.
        took: Function that is called with the position of each sample when it is read.
    """

    def __init__(self, samples: Iterable[Sample], took: Callable[[int], object]) -> None:
        super().__init__(samples)
        self._took = took
        self._open = False
        self._lock = threading.Lock()  # the function may have threads

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._open = False

    def __getattr__(self, name: str) -> Any:
        """Raise an error that says what this list is, because a reward function used it as if it were something else.

        Raises:
            AttributeError: Always: a list has no such attribute.
        """
        names = [field.name for field in fields(Sample)]
        if name in names or (hasattr(Sample, name) and not name.startswith("_")):
            raise AttributeError(f"samples is a list of Sample: for sample in samples: sample.{name}")
        raise AttributeError(f"samples is a list of Sample, and has no {name!r}; a Sample has {', '.join(names)}")

    def __iter__(self) -> Iterator[Sample]:
        for position, sample in enumerate(super().__iter__()):
            self._report(position)
            yield sample

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Sample: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Sample]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Sample | list[Sample]:
        if not isinstance(index, slice):
            self._report(index.__index__() % max(len(self), 1))
        return super().__getitem__(index)

    def _report(self, position: int) -> None:
        with self._lock:
            if self._open:
                self._took(position)
