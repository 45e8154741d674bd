"""JSON lines: read them one by one, read them from the end of a file, and remove the last ones in place."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from anytron.base.files import write_durably
from anytron.config.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO


BLOCK = 1 << 16
"""Bytes that are read at one time from the end of a file."""


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, with only one in memory at a time; lines that are not JSON objects are left out."""
    with path.open("rb") as lines:  # by bytes: in text, other characters end lines, too (U+2028, U+0085)
        for line in lines:
            with suppress(ValueError):
                yield parse_object(line)


def last_record(path: Path) -> dict[str, Any] | None:
    """Read the last record of a file without reading the earlier ones; None if the file is empty.

    Raises:
        ValueError: The last line is not a JSON object.
    """
    with path.open("rb") as file:
        return next((parse_object(line) for _, line in backwards(file)), None)


def backwards(file: BinaryIO, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    r"""Yield the lines of a file from the last to the first, each with its offset.

    Each line ends with ``\n``; only the first one that is yielded may be cut short.

    Args:
        file: The file; its position changes.
        end: Offset at which the last line ends; None = the end of the file.
    """
    begin = file.seek(0, os.SEEK_END) if end is None else end
    later: list[bytes] = []  # parts of a line whose beginning is not read yet, the last part first
    while begin:
        size = min(BLOCK, begin)
        begin = file.seek(begin - size)
        block = file.read(size)
        line_end = stop = len(block)
        while (found := block.rfind(b"\n", 0, stop)) >= 0:
            later.append(block[found + 1 : line_end])
            if line := b"".join(reversed(later)):
                yield begin + found + 1, line
            later.clear()
            stop, line_end = found, found + 1
        later.append(block[:line_end])
    if line := b"".join(reversed(later)):
        yield 0, line


def cut_back(path: Path, step: int) -> None:
    """Remove the last lines of a file, up to the record of ``step`` or an earlier one; lines before it stay.

    Only what is removed is read. The file is cut in place and at once: whenever the process is killed, the file is as
    it was before or as it is afterwards.

    Args:
        path: The file, with records in the order of their steps. A path that does not exist, or is a symbolic link,
            becomes an empty file.
        step: The last step whose records are kept.
    """
    if not path.is_file() or path.is_symlink():
        write_durably(path, "")
        return
    with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        kept = next((offset + len(line) for offset, line in backwards(file) if _is_kept(line, step)), 0)
        file.truncate(kept)
        os.fsync(file.fileno())


def _is_kept(line: bytes, step: int) -> bool:
    try:
        record = parse_object(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and "step" in record and bool(record["step"] <= step)
