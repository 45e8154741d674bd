"""Plain data as bytes, for answers of a process that reads untrusted files.

The format is JSON, because reading it can only make plain values; bytes follow it unencoded. Some types that JSON does
not have are supported because columns of tables hold them: bytes, paths, dates and times, decimal numbers. Each is an
object with one key, which begins with a random mark of the message, so that no file can imitate it. Tuples become
lists.
"""

from __future__ import annotations

import json
import secrets
import struct
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LENGTH = struct.Struct("<Q")
_READERS: dict[str, Callable[[Any], Any]] = {
    "path": Path,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "decimal": Decimal,
}

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_NO_BLOBS = _LENGTH.pack(len(b'[""]')) + b'[""]'
"""The header of a message that is JSON only."""


def packed(value: Any) -> bytes:
    """Encode a plain value.

    Raises:
        TypeError: A part of the value is not plain data.
    """
    with suppress(TypeError):  # most values are JSON
        body = _JSON.encode(value).encode("utf-8", "surrogatepass")
        return b"".join((_NO_BLOBS, _LENGTH.pack(len(body)), body))
    blobs: list[bytes] = []
    mark = secrets.token_hex(8)

    def written(one: Any) -> dict[str, Any]:
        if isinstance(one, (bytes, bytearray, memoryview)):
            blobs.append(bytes(one))
            return {mark + "bytes": len(blobs) - 1}
        if isinstance(one, PurePath):
            return {mark + "path": str(one)}
        if isinstance(one, datetime):  # a pandas.Timestamp is one, and may have nanoseconds
            one = one.to_pydatetime(warn=False) if hasattr(one, "to_pydatetime") else one
            return {mark + "datetime": one.isoformat()}
        if isinstance(one, (date, time)):
            return {mark + ("date" if isinstance(one, date) else "time"): one.isoformat()}
        if isinstance(one, timedelta):
            return {mark + "timedelta": [one.days, one.seconds, one.microseconds]}
        if isinstance(one, Decimal):
            return {mark + "decimal": str(one)}
        raise TypeError(f"a value of the type {type(one).__name__} is not plain data")

    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=written)
    header = json.dumps([mark if mark in text else "", *map(len, blobs)]).encode()
    body = text.encode("utf-8", "surrogatepass")
    return b"".join((_LENGTH.pack(len(header)), header, _LENGTH.pack(len(body)), body, *blobs))


def unpacked(data: bytes) -> Any:
    """Decode bytes of :func:`packed`, which may come from an untrusted process.

    Raises:
        ValueError: The bytes are malformed.
    """
    try:
        header, rest = _cut(memoryview(data))
        mark, *lengths = json.loads(bytes(header))
        if any(type(length) is not int or length < 0 for length in lengths):
            raise ValueError("a length in the header is not an integer of at least 0")  # noqa: TRY301 - one way to say it
        body, rest = _cut(rest)
        if not mark:
            return json.loads(str(body, "utf-8", "surrogatepass"))
        blobs = _blobs(rest, lengths)
        return json.loads(str(body, "utf-8", "surrogatepass"), object_hook=lambda one: _value(one, mark, blobs))
    except (ValueError, TypeError, IndexError, ArithmeticError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"received data that cannot be decoded: {type(error).__name__}: {error}") from error


def _cut(data: memoryview) -> tuple[memoryview, memoryview]:
    length = _LENGTH.unpack_from(data)[0]
    return data[8 : 8 + length], data[8 + length :]


def _blobs(data: memoryview, lengths: Sequence[int]) -> list[bytes]:
    found, place = [], 0
    for length in lengths:
        found.append(bytes(data[place : place + length]))
        place += length
    return found


def _value(one: dict[str, Any], mark: str, blobs: Sequence[bytes]) -> Any:
    if len(one) != 1:
        return one
    ((key, value),) = one.items()
    if not key.startswith(mark):
        return one
    kind = key.removeprefix(mark)
    return blobs[value] if kind == "bytes" else _READERS[kind](value) if kind in _READERS else one
