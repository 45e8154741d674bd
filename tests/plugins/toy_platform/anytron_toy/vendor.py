"""Stands for a vendor's library: process-global state, and a constant that has to be patched."""

from __future__ import annotations

TILE = 16
ACTUAL_LENGTHS: list[int] | None = None


def set_actual_lengths(lengths: list[int] | None) -> None:
    """Set what the toy's kernels would read behind everybody's back."""
    global ACTUAL_LENGTHS  # noqa: PLW0603 - the fault of vendors' libraries that scopes are for
    ACTUAL_LENGTHS = lengths
