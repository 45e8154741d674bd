"""Ranges of adjacent tokens in flat values: copying ranges takes a fraction of the time of copying by indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


def bounds_of(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find the ranges of True entries.

    Args:
        mask: bool ``[T]``.

    Returns:
        For each range, in order: the index of its first entry, and the index after its last one; int64 each.
    """
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    bounds = np.concatenate([[0] if mask[:1].any() else [], changes, [len(mask)] if mask[-1:].any() else []])
    bounds = bounds.astype(np.int64, copy=False)
    return bounds[::2], bounds[1::2]


def counts_of(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Count, for each sequence, its tokens that lie in ranges: int64 ``[B]``.

    Args:
        starts: Where the ranges begin, ascending; a range may go from one sequence on to the next.
        ends: Index after the last entry of each range.
        lengths: int64 ``[B]``, tokens of each sequence.
    """
    stops = lengths.cumsum()
    begun = np.searchsorted(starts, stops)
    beyond = np.maximum(np.append(0, ends)[begun] - stops, 0)  # of the last range that has begun
    until: npt.NDArray[np.int64] = np.append(0, (ends - starts).cumsum())[begun] - beyond
    return np.diff(until, prepend=0)


def slices(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[slice]:
    """Return a slice for each range."""
    return list(map(slice, starts.tolist(), ends.tolist()))


def taken(values: npt.NDArray[Any], ranges: Sequence[slice]) -> npt.NDArray[Any]:
    """Copy ranges of values, ``[T, ...]``, one behind the other."""
    return np.concatenate([values[:0], *[values[one] for one in ranges]])
