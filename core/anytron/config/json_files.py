"""Read JSON files that another user or another machine may have written.

A fault of the file raises ``ValueError``, whose message describes the fault. If the process has run out of file
descriptors or the disk fails, the file is not at fault: this raises :class:`~anytron.base.errors.ResourceError`, and is
never mistaken for a missing file.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.base.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


DEEPEST = 32
"""Most levels of nesting in a configuration or in a model's JSON files; published models have ten."""


def is_too_deep(value: Any, deepest: int = DEEPEST) -> bool:
    """Whether mappings and lists are nested more than ``deepest`` levels deep. Does not recurse."""
    level = [value]
    for _ in range(deepest + 1):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return False
    return True


def is_writable(text: str) -> bool:
    r"""Whether a string can be written as UTF-8: it has no unpaired surrogate (JSON's ``\ud800``)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, string) for every string in nested mappings and lists.

    The keys of a mapping are yielded, too, each with the dotted key of the mapping.
    """
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from strings(name, key) if isinstance(name, str) else ()
            yield from strings(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from strings(part, f"{key}.{index}" if key else str(index))


def _parts(whole: Any) -> Iterator[Any]:
    """The mappings and lists directly inside of one."""
    parts = whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ()
    yield from (part for part in parts if isinstance(part, (dict, list)))


LARGEST_FILE = 64 * 2**20
"""Most bytes of a JSON file; the largest published files, indices of weights, have a fifth of that."""
WITH_CONFIGURATION = DEEPEST + 8
"""Most levels of nesting in a file of Anytron that contains a run's configuration."""


def read_bytes(path: Path, largest: int = LARGEST_FILE) -> bytes:
    """Read a file.

    Args:
        path: Path of the file; links are followed.
        largest: Most bytes that the file may have.

    Raises:
        FileNotFoundError: The file does not exist or is not a regular file (reading a pipe or a device may not end).
        OSError: The file cannot be read.
        ValueError: The file is too large.
        ResourceError: The process has run out of file descriptors, or the disk fails.
    """
    try:
        if not path.is_file():
            raise FileNotFoundError("the file does not exist, or is a directory, a pipe or a device")
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        if (known := exhausted(error, str(path))) is not None:
            raise known from error
        raise
    if len(data) > largest:
        raise ValueError(f"it has more than {largest} bytes")
    return data


def parse_json(data: bytes | str, deepest: int = DEEPEST) -> Any:
    """Parse UTF-8 encoded JSON that is nested at most ``deepest`` levels deep.

    Raises:
        ValueError: The bytes are not UTF-8 or not JSON, or the value is nested too deeply.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # With so few brackets it cannot be; a walk through the value takes longer than parsing it.
    if text.count("[") + text.count("{") > deepest and is_too_deep(value, deepest):
        raise ValueError(f"it is nested more than {deepest} levels")
    return value


def parse_object(data: bytes | str, deepest: int = DEEPEST) -> dict[str, Any]:
    """Parse a JSON object as :func:`parse_json` does.

    Raises:
        ValueError: As :func:`parse_json`, or the value is not an object.
    """
    value = parse_json(data, deepest)
    if not isinstance(value, dict):
        raise ValueError(f"it is of type {type(value).__name__}, not an object")  # noqa: TRY004 - of the file
    return value


def read_object(path: Path, largest: int = LARGEST_FILE, deepest: int = DEEPEST) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises as :func:`read_bytes` and :func:`parse_object`."""
    return parse_object(read_bytes(path, largest), deepest)
