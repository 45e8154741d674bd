"""Stands for a vendor's library: process-global state, and a constant that has to be patched."""

from __future__ import annotations

TILE = 16
ACTUAL_LENGTHS: list[int] | None = None


def set_actual_lengths(lengths: list[int] | None) -> list[int] | None:
    """Set what the toy's kernels would read behind everybody's back, and give what was set before."""
    global ACTUAL_LENGTHS
    before, ACTUAL_LENGTHS = ACTUAL_LENGTHS, lengths
    return before
