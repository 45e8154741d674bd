"""A reward process: it calls one reward function, for the driver, until the driver is gone.

Plain JSON comes first: what to call. Then come pickled samples, one list per call. All that goes back is JSON: what
has run a user's code is not trusted with more. Importing this module imports no torch; the function may.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from typing_extensions import Self

from anytron.rewards.answer import answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from anytron.rewards.sample import Sample

STACK_SIGNAL = signal.SIGUSR1
"""Makes the process write the stacks of all its threads to its log, whatever it does, when a call takes too long."""
REPORT_S = 1.0
"""A function that goes through its samples again and again is reported this often."""
GIB = 1 << 30


def main(channel: int, lifeline: int) -> None:
    """Call the function that the driver names with every list of samples that the driver sends.

    Args:
        channel: This process's end of a socket pair.
        lifeline: A pipe that nobody writes to; the driver holds its other end.
    """
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)
    _end_with_driver(lifeline)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    connection = Connection(channel)
    start = json.loads(connection.recv_bytes())
    sys.path[:] = start["sys_path"]
    _limit_memory(start["memory_gib"])

    from anytron.config.imports import resolve
    from anytron.rewards.registered import REWARDS

    function = partial(resolve(start["function"], key=start["key"], registered=REWARDS), **start["options"])
    _send(connection, {"ready": True})
    while True:
        try:
            frame = connection.recv_bytes()
        except EOFError:
            return
        try:
            samples: list[Sample] = pickle.loads(frame)  # noqa: S301 - the driver made it
        except Exception as error:  # noqa: BLE001 - whatever the prompts' data is made of
            _send(connection, {"unreadable": f"{type(error).__name__}: {error}"})
            continue
        with WatchedSamples(samples, lambda position: _send(connection, {"at": position})) as watched:
            found = answer(function, watched)
        _send(connection, found.as_json())
        if any(failure.ends for failure in found.failures):
            return


class WatchedSamples(list["Sample"]):
    """A list that tells which of its samples is taken out: how far a function has come.

    The time-out counts from the last one, and a function that hangs or dies was looking at it.

    Args:
        samples: What the list holds.
        took: Is told a position when it is taken for the first time, and about once a second after that.
    """

    def __init__(self, samples: Iterable[Sample], took: Callable[[int], object]) -> None:
        super().__init__(samples)
        self._took = took
        self._furthest = -1
        self._reported = 0.0
        self._open = False
        self._lock = threading.Lock()  # the function may have threads

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._open = False

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
            now = time.monotonic()
            if self._open and (position > self._furthest or now - self._reported > REPORT_S):
                self._furthest = max(position, self._furthest)
                self._reported = now
                self._took(position)


def _send(connection: Connection, record: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(record).encode())


def _end_with_driver(lifeline: int) -> None:
    """Have the kernel kill this process group when the driver's end of the lifeline closes.

    A thread that waits for that, as engines' processes have, would not do: a function can hold the interpreter's lock
    for ever (a regular expression that backtracks is the usual one).
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _limit_memory(limit_gib: float | None) -> None:
    """Limit what the process may allocate, and let it be the first to go if the machine runs out of memory.

    Not ``RLIMIT_AS``: libraries such as torch reserve far more addresses than they use.
    """
    if limit_gib is not None:
        limit = int(limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
