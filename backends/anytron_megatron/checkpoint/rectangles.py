"""Divide a flat range of a tensor into rectangles, and find the overlap of two rectangles. Imports no Megatron."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut a range of a flattened tensor into rectangles, each contiguous.

    In two dimensions the rectangles are the rest of a row, whole rows, and the beginning of a row.

    Args:
        shape: Shape of the tensor.
        begin: First element.
        end: One past the last element.

    Yields:
        For each rectangle, in order: its offset, its size, and the index of its first element in the flattened tensor.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape), begin
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    yield from _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row
    yield from _in_row(shape, last, 0, end - last * row)


def _in_row(
    shape: tuple[int, ...], number: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut a range within one row. A range that begins at the row's end is empty."""
    row = math.prod(shape[1:])
    for offset, size, position in rectangles(shape[1:], begin, end):
        yield (number, *offset), (1, *size), number * row + position


def overlap(
    offset: Sequence[int], size: Sequence[int], other_offset: Sequence[int], other_size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Find the overlap of two rectangles of one tensor.

    Returns:
        Slices that select the overlap in the first and in the second rectangle; None if they do not overlap.
    """
    own, others = [], []
    for a, length, b, other_length in zip(offset, size, other_offset, other_size, strict=True):
        begin, end = max(a, b), min(a + length, b + other_length)
        if begin >= end:
            return None
        own.append(slice(begin - a, end - a))
        others.append(slice(begin - b, end - b))
    return tuple(own), tuple(others)
