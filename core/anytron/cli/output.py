"""Output of a run that may be lost without ending the run."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


class Expendable:
    """A text stream that is given up when it cannot be written to: its reader is gone, or its disk is full.

    Args:
        stream: The stream; None, which Python gives for one that was closed at the start, takes everything silently.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO | None = stream

    def write(self, text: str) -> int:
        """Write, or do nothing."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush, or do nothing."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        assert self._stream is not None, "only a stream that is there fails"
        # What is still in its buffer goes nowhere; otherwise Python would try again, and fail, at its end.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        self._stream = None
        with contextlib.suppress(OSError):
            sys.stderr.write(f"the output of the run is lost from here on ({error.strerror}); the run goes on\n")


@contextlib.contextmanager
def run_output() -> Iterator[Console]:
    """Give a console on the standard output.

    Neither its loss nor that of the error output, which is often the same pipe, ends the run or spoils its exit status.
    """
    with contextlib.redirect_stderr(Expendable(sys.stderr)):
        yield Console(file=Expendable(sys.stdout), highlight=False, soft_wrap=True)  # type: ignore[arg-type]
