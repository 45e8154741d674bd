"""Write records as they come."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from anytron.base.files import replacing, why_lost
from anytron.config.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class JsonlSink:
    """One JSON object per line, flushed line by line.

    Args:
        path: The file; it must not exist.
        after: Instead: continue an existing file after the records of this step. Later ones, and a line that a crash
            has cut short, are removed first.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        if after is not None:
            _cut_back(path, after)
        # Text from prompts can hold halves of surrogate pairs, which UTF-8 cannot: they are escaped, as JSON allows.
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if after is None else 0)
        self._file = os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8", errors="backslashreplace")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, in the file when this returns. NaN and infinity are written as Python's ``json`` does."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def lost(self) -> str:
        """Say why what is written is not in the file at :attr:`path` any more; nothing as long as it is."""
        return why_lost(self.path, self._file.fileno())

    def take(self, other: JsonlSink) -> None:
        """Append all records of another one: also of a file that was removed, which ends when it is closed."""
        offset = 0
        while block := os.pread(other._file.fileno(), 1 << 20, offset):
            self._file.buffer.write(block)
            offset += len(block)
        self.sync()

    def sync(self) -> None:
        """Wait until all records are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read what a :class:`JsonlSink` wrote."""
    # Not splitlines(): JSON strings may hold other characters that it takes for ends of lines (U+2028, U+0085).
    return [parse_object(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _cut_back(path: Path, step: int) -> None:
    """Keep the records of the steps up to ``step``."""
    with replacing(path) as kept:
        if not path.is_file() or path.is_symlink():
            return
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                record = _parsed(line)
                if record is not None and record["step"] <= step:
                    kept.write(line)


def _parsed(line: str) -> Any:
    """A record with a step; None for a line that was cut short."""
    try:
        record = parse_object(line)
    except ValueError:
        return None
    return record if line.endswith("\n") and "step" in record else None
