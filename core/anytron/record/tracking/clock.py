"""Measure the parts of a training step."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Clock:
    """A step's times. Starts when it is made.

    Args:
        begins: Is told the name of each part that begins.

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
        """Seconds since the clock was made."""
        return time.perf_counter() - self._began
