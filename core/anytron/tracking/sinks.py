"""Write records as they come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class JsonlSink:
    """One JSON object per line, flushed line by line.

    Args:
        path: The file; it must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, on disk when this returns. NaN and infinity are written as Python's ``json`` reads them."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read what a :class:`JsonlSink` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
