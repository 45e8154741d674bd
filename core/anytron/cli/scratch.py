"""The temporary directory of a command that starts processes and leaves no run."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.files import remove

if TYPE_CHECKING:
    from rich.console import Console

LOGS = "logs"


class ScratchDirectory:
    """A private temporary directory. A context manager: leaving deletes it.

    After an error the logs of processes stay, because the error names them, and it is said where they are; not after
    Ctrl-C or a signal.

    Args:
        command: Of ``anytron``; part of the directory's name.
        notes: Is told where the logs are.

    Attributes:
        path: The directory; processes write to ``logs`` in it.
    """

    def __init__(self, command: str, notes: Console) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"anytron-{command}-"))
        self._notes = notes
        self._keeps_logs = False

    def keep_logs(self) -> None:
        """Leave the logs when all else is deleted."""
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
