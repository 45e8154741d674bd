"""What makes a checkpoint complete: every file of it, by name, with size and checksum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        size: Bytes.
        sha256: Of its content, in hexadecimal.
    """

    size: int
    sha256: str
