"""Read the headers of safetensors files, in milliseconds.

The format is read here and not through the safetensors library: it is a length of eight bytes, a JSON
header and the data (https://github.com/huggingface/safetensors#format), and the driver needs no torch for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.base.files import exhausted
from anytron.config.json_files import parse_object

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""The format's own limit, in bytes."""


class DamagedFileError(Exception):
    """A file is not in the format of safetensors."""


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the names and shapes of the tensors in a file, and check that the file is complete.

    Raises:
        DamagedFileError: The file is not a safetensors file, or its size does not match its header.
        ResourceError: The process has run out of file descriptors, or the disk fails.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_LONGEST_HEADER, size - _LENGTH_BYTES):
                raise DamagedFileError(
                    f"the file has {size} bytes, but its beginning says that its header has {length} bytes: it is cut "
                    "short, or not a safetensors file"
                )
            header = parse_object(file.read(length))
        header.pop("__metadata__", None)
        end = max((_sizes(entry["data_offsets"])[1] for entry in header.values()), default=0)
        shapes = {name: _sizes(entry["shape"]) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        if (known := exhausted(error, str(path))) is not None:
            raise known from error
        raise DamagedFileError(f"its header cannot be read: {type(error).__name__}: {error}") from error
    if (whole := _LENGTH_BYTES + length + end) != size:
        raise DamagedFileError(f"the file has {size} bytes, but its header requires {whole}")
    return shapes


def _sizes(value: Any) -> tuple[int, ...]:
    """A list of whole numbers, none below zero.

    Raises:
        TypeError: The value is anything else.
    """
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise TypeError(f"{value!r:.60} is not a list of sizes")
    return tuple(value)
