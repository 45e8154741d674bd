"""Read a file of JSON lines while another process writes it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.config.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Record:
    """A line that was read.

    Attributes:
        offset: Where it begins in the file, in bytes.
        value: The JSON object.
    """

    offset: int
    value: dict[str, Any]


class Tail:
    """Gives the records of a file as they come. A line that has no end yet is read when it has one.

    Args:
        path: The file; it may come later.

    Attributes:
        broken: Whole lines that were no JSON objects.
        cut_short: The file ended in the middle of a line when it was last read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self.broken = 0
        self.cut_short = False

    def read(self) -> Iterator[Record | None]:
        """Yield the records that are new since the last call; None = the file is another one, forget the old records.

        A run that is resumed cuts its files back, and puts new ones in the place of the old.
        """
        if not self._path.is_file():  # a pipe would be waited for
            return
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._identity != (found.st_dev, found.st_ino) or found.st_size < self._offset:
                self._identity, self._offset, self.broken = (found.st_dev, found.st_ino), 0, 0
                yield None
            file.seek(self._offset)
            self.cut_short = False
            for line in file:
                if not line.endswith(b"\n"):
                    self.cut_short = True
                    return
                offset, self._offset = self._offset, self._offset + len(line)
                value = parsed(line)
                if value is None:
                    self.broken += bool(line.strip())
                else:
                    yield Record(offset, value)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Read a line as a JSON object; None if it is none."""
    try:
        return parse_object(line.decode(errors="replace"))
    except ValueError:
        return None


def step_of(record: dict[str, Any]) -> int | None:
    """Give the step of a record; None if it has none."""
    step = record.get("step")
    if isinstance(step, float) and step.is_integer():
        step = int(step)
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None
