"""Write records as they come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class MetricSink(Protocol):
    """Receives the metrics of every step."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record; when this returns, a crash of the process does not lose it."""

    def close(self) -> None:
        """Release what the sink holds."""


class JsonlSink:
    """One JSON object per line, flushed line by line.

    Args:
        path: The file; it must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. NaN and infinity are written as Python's ``json`` reads them."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read what a :class:`JsonlSink` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
