"""Short names for several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name each path by its last parts, as many as tell all of them apart."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [str(path) for path in paths]
