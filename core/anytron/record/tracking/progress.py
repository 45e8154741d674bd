"""The interface through which a run reports its progress, and the clock of a step."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


class Progress:
    """Shows the user how a run goes; this base class shows nothing. A context manager: leaving calls :meth:`finish`."""

    def start(self, total_steps: int, devices: Sequence[str], kernels: Mapping[str, str], done: int = 0) -> None:
        """Called when the workers have started and the first step begins.

        Args:
            total_steps: Number of training steps of the run.
            devices: Device of each training rank.
            kernels: Names of the plugins that supplied each kernel, by the kernel's name.
            done: Number of steps that were completed before this process started.
        """

    def part(self, name: str) -> None:
        """Called when a part of a step begins: ``rollout``, ``update`` and so on."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Called when a step is done, with the metrics that are written to ``metrics.jsonl``."""

    def note(self, text: str) -> None:
        """Show a message, for example that a checkpoint was saved or from where the run resumes."""

    def warn(self, text: str) -> None:
        """Show a warning; the run goes on."""

    def finish(self) -> None:
        """Called when the last step is done, before the model is saved."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()


class Clock:
    """Measures how long the parts of a step take. The clock starts when it is constructed.

    Args:
        begins: Called with the name of each part when the part begins.

    Attributes:
        seconds: Wall-clock seconds of each part measured so far.
    """

    def __init__(self, begins: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._begins = begins
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the ``with`` block to ``part``."""
        self._begins(part)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def elapsed(self) -> float:
        """Return the seconds since the clock was constructed."""
        return time.perf_counter() - self._began
