"""The library of Basalt accelerators, as their vendor would ship it: here a simulator on the host's processor.

It has what makes such libraries hard to use: state that belongs to the whole process, and a fault that newer versions
do not have. Nothing in it knows Anytron.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_SEQUENCE = 32768
"""Positions have 15 bits."""
TILE = 16
"""Tokens that the device reads at a time. Since version 1.3 the variable ``BASALT_TILE`` sets it."""

_lengths: tuple[int, ...] | None = None


class DriverError(RuntimeError):
    """The driver is there and does not work."""


def device_count() -> int:
    """Devices that the driver reports. In this simulator the variable ``BASALT_DEVICES`` says how many.

    Raises:
        DriverError: The driver does not answer.
    """
    answer = os.environ.get("BASALT_DEVICES", "0")
    if not answer.isdecimal():
        raise DriverError(f"the driver answers '{answer}'")
    return int(answer)


def set_lengths(lengths: Sequence[int] | None) -> tuple[int, ...] | None:
    """Set the sequence lengths for all kernels of this process; return the previous lengths."""
    global _lengths
    before, _lengths = _lengths, None if lengths is None else tuple(lengths)
    return before


def lengths() -> tuple[int, ...] | None:
    """The lengths that kernels were told."""
    return _lengths


def tiles(length: int) -> int:
    """Tiles that the device reads for a sequence."""
    return -(-length // TILE)
