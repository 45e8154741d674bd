"""Plots made of characters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Heights of an eighth to a whole line."""
PLAIN = " .:-=+*#@"
"""The same for terminals that know ASCII only."""


def plot(values: Sequence[float], width: int, lines: int = 1, levels: str = BLOCKS) -> list[str]:
    """Draw columns, the first value on the left.

    Args:
        values: Those that are not finite leave a gap, or ``!`` in the lowest line where a column has no other.
        width: Characters; of more values each column shows the mean of several.
        lines: Of text.
        levels: From empty to full, nine characters.

    Returns:
        The lines, the highest first, each as wide as there are columns.
    """
    columns = _columns(values, width)
    finite = [value for value in columns if value is not None]
    if not finite:
        return [" " * len(columns)] * (lines - 1) + ["!" * len(columns)]
    low, high = min(finite), max(finite)
    full = len(levels) - 1
    drawn = []
    for line in reversed(range(lines)):
        text = ""
        for value in columns:
            if value is None:
                text += " " if line else "!"
                continue
            part = (value - low) / (high - low) if high > low else 0.5
            height = 1 + round(part * (lines * full - 1))  # the lowest is seen as well
            text += levels[min(max(height - line * full, 0), full)]
        drawn.append(text)
    return drawn


def _columns(values: Sequence[float], width: int) -> list[float | None]:
    count = min(len(values), width)
    found: list[float | None] = []
    for column in range(count):
        part = values[column * len(values) // count : (column + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        found.append(math.fsum(finite) / len(finite) if finite else None)
    return found
