"""Entry points, remembered.

Each look at entry points reads the files of every installed distribution. A run of two steps has sixty-six, which take
a quarter of the driver's time.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoints, entry_points

from anytron.base import components
from anytron.device.loading import discovery


@functools.cache
def _found(path: tuple[str, ...], wanted: tuple[tuple[str, str], ...]) -> EntryPoints:
    return entry_points(**dict(wanted))


def remembered(**wanted: str) -> EntryPoints:
    """Give the entry points that ``importlib.metadata`` gives for as long as the path of modules stays the same."""
    return _found(tuple(sys.path), tuple(wanted.items()))


def remember(setattr: object = setattr) -> None:
    """Let Anytron look at remembered entry points in this process.

    Args:
        setattr: A function that sets an attribute, such as a monkeypatch's.
    """
    for module in (components, discovery):
        setattr(module, "entry_points", remembered)
