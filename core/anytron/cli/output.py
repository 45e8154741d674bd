"""Consoles that escape control characters, tables, and the temporary directory of a command."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.segment import Segment
from typing_extensions import Self

from anytron.base.files import remove
from anytron.base.terminal import VisibleStream, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import TextIO

    from rich.console import ConsoleOptions, RenderableType
    from rich.table import Table


FILE_WIDTH = 100
"""Columns where the output is not a terminal: rich would take 80."""


def unwrapped(stream: Any) -> Any:
    """Return the stream below a :class:`~anytron.base.terminal.VisibleStream`; any other stream is returned itself."""
    return stream.stream if isinstance(stream, VisibleStream) else stream


class VisibleConsole(Console):
    """A rich console that escapes control characters. It reads no markup, because the name of a file may have brackets.

    Args:
        file: The stream. If it is a :class:`~anytron.base.terminal.VisibleStream`, the console writes to the stream
            below it, so that the colours and cursor movements of rich itself are not escaped.
        options: As for :class:`rich.console.Console`.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file=unwrapped(file), highlight=False, markup=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable, with visible text and without links."""
        for text, style, control in super().render(renderable, options):
            shown = text if control else visible(text, self.encoding)
            yield Segment(shown, style.update_link(None) if style is not None and style.link else style, control)


def error_console() -> Console:
    """Return a console on stderr, for messages that accompany a result."""
    return VisibleConsole(sys.stderr, soft_wrap=True)


def result_console(width: int = FILE_WIDTH) -> Console:
    """Return a console on the standard output, as wide as the terminal, or as ``width`` columns where there is none."""
    console = VisibleConsole(sys.stdout)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return VisibleConsole(sys.stdout, width=width)


class Expendable:
    """A text stream that ignores all further text once a write has failed: its reader is gone, or its disk is full.

    Args:
        stream: The stream; None = all text is ignored (``sys.stdout`` is None if it was closed when Python started).
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO | None = stream

    def write(self, text: str) -> int:
        """Write the text, or ignore it."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless it is ignored."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
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
    """Yield a console on stdout; if the reader of stdout or stderr is gone, the run goes on without that output.

    The exit status of the run does not change. Both streams are covered because they are often the same pipe.
    """
    with contextlib.redirect_stderr(Expendable(sys.stderr)):
        yield VisibleConsole(Expendable(unwrapped(sys.stdout)), soft_wrap=True)


TABLE_WIDTH = 200
"""Columns of a table where the output is not a terminal; in fewer, its names would be cut short."""


def print_table(table: Table) -> None:
    """Print a table on the standard output."""
    result_console(TABLE_WIDTH).print(table)


def kernels_line(suppliers: Mapping[str, str]) -> str:
    """Return a line that says which plugins supplied which kernels.

    Args:
        suppliers: Plugins by kernel, as :meth:`anytron.device.hooks.facade.Hooks.suppliers` returns them.
    """
    by_plugin: dict[str, list[str]] = {}
    for kernel, plugins in suppliers.items():
        by_plugin.setdefault(plugins, []).append(kernel.removeprefix("fused_kernel ").removesuffix("_kernel"))
    parts = [f"{', '.join(kernels)} from {plugins}" for plugins, kernels in sorted(by_plugin.items())]
    return "kernels: " + ("; ".join(parts) or "the engine's own")


LOGS = "logs"


class ScratchDirectory:
    """A private temporary directory. A context manager: leaving deletes it.

    After an error the logs of processes are kept, because the error names them, and a message says where they are.
    After Ctrl-C or a signal they are deleted too.

    Args:
        command: Subcommand of ``anytron``; part of the directory's name.
        notes: Console to which the place of the logs is written.

    Attributes:
        path: The directory; processes write to ``logs`` in it.
    """

    def __init__(self, command: str, notes: Console) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"anytron-{command}-"))
        self._notes = notes
        self._keeps_logs = False

    def keep_logs(self) -> None:
        """Keep the logs when everything else is deleted."""
        self._keeps_logs = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        failed = kind is not None and issubclass(kind, Exception)
        if not ((failed or self._keeps_logs) and (self.path / LOGS).is_dir()):
            shutil.rmtree(self.path)
            return
        for path in self.path.iterdir():
            if path.name != LOGS:
                remove(path)
        self._notes.print(f"logs of the processes: {self.path / LOGS}")
