"""Thrift's compact protocol, in which Parquet writes its footer: read into plain values, and written from such.

Source: the Thrift project, ``doc/specs/thrift-compact-protocol.md``. A struct is a mapping of field numbers to
``[type, value]``; a list is ``[type of its elements, elements]``.
"""

from __future__ import annotations

import struct

TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
NUMBERS = (4, 5, 6)
"""i16, i32, i64: written as zigzag varints."""


def read(data):
    """The struct that bytes begin with."""
    return _read(STRUCT, iter(data))


def write(fields):
    return bytes(_written(STRUCT, fields))


def numbers(fields, path=()):
    """Yield (path, type) of each number and truth value in a struct; a path leads to a ``[type, value]``."""
    for place, (kind, value) in fields.items():
        if kind == STRUCT:
            yield from numbers(value, (*path, place))
        elif kind == LIST:
            yield from _of_list(value, (*path, place))
        elif kind in NUMBERS:
            yield (*path, place)


def _of_list(value, path):
    kind, elements = value
    for index, element in enumerate(elements):
        if kind == STRUCT:
            yield from numbers(element, (*path, index))
        elif kind in NUMBERS:
            yield (*path, index)


def put(fields, path, new):
    """Replace the value at a path."""
    holder, inside = fields, None
    for step in path:
        if isinstance(holder, dict):
            inside = holder[step]
            holder = inside[1]
        else:
            last, inside = holder, None
            holder = last[1][step]
    if inside is not None:
        inside[1] = new
    else:
        last[1][path[-1]] = new


def at(fields, path):
    """The value at a path."""
    holder = fields
    for step in path:
        holder = holder[step][1] if isinstance(holder, dict) else holder[1][step]
    return holder


def _varint(data):
    number, shift = 0, 0
    while True:
        byte = next(data)
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number


def _zigzag(data):
    number = _varint(data)
    return number >> 1 ^ -(number & 1)


def _read(kind, data):
    if kind in (TRUE, FALSE):
        return kind == TRUE
    if kind == BYTE:
        return next(data)
    if kind in NUMBERS:
        return _zigzag(data)
    if kind == DOUBLE:
        return bytes(next(data) for _ in range(8))
    if kind == BINARY:
        return bytes(next(data) for _ in range(_varint(data)))
    if kind in (LIST, SET):
        header = next(data)
        count = header >> 4 if header >> 4 < 15 else _varint(data)
        return [header & 15, [_element(header & 15, data) for _ in range(count)]]
    fields, last = {}, 0
    while header := next(data):
        last = last + (header >> 4) if header >> 4 else _zigzag(data)
        fields[last] = [header & 15, _read(header & 15, data)]
    return fields


def _element(kind, data):
    return next(data) == TRUE if kind in (TRUE, FALSE) else _read(kind, data)


def _of_varint(number):
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number


def _of_zigzag(number):
    return _of_varint((number << 1 ^ number >> 63) & (2**64 - 1))


def _written(kind, value):
    if kind == BYTE:
        yield value
    elif kind in NUMBERS:
        yield from _of_zigzag(value)
    elif kind == DOUBLE:
        yield from value
    elif kind == BINARY:
        yield from _of_varint(len(value))
        yield from value
    elif kind in (LIST, SET):
        inner, elements = value
        yield min(len(elements), 15) << 4 | inner
        if len(elements) > 14:
            yield from _of_varint(len(elements))
        for element in elements:
            yield from [TRUE if element else FALSE] if inner in (TRUE, FALSE) else _written(inner, element)
    elif kind == STRUCT:
        for place, (inner, field) in value.items():
            yield (TRUE if field else FALSE) if inner in (TRUE, FALSE) else inner
            yield from _of_zigzag(place)
            yield from _written(inner, field)
        yield 0


def footer_of(file):
    """A Parquet file's footer, and what stands before it."""
    length = struct.unpack("<I", file[-8:-4])[0]
    return read(file[-8 - length : -8]), file[: -8 - length]


def with_footer(fields, before):
    footer = write(fields)
    return before + footer + struct.pack("<I", len(footer)) + b"PAR1"
