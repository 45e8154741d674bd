"""Exchange functions of libraries, and put the originals back."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def swapped(target: str, function: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of another one; the original is its first argument.

    Args:
        target: ``package.module:name`` or ``package.module:Class.name``.
        function: Called with the original and the arguments of each call. If ``target`` is a mapping, it is called
            with the original once, and returns what takes its place.
    """
    place, _, name = target.rpartition(":")
    path, _, name = name.rpartition(".")
    owner = pkgutil.resolve_name(f"{place}:{path}" if path else place)
    found = inspect.getattr_static(owner, name)
    original = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found

    if isinstance(found, Mapping):
        setattr(owner, name, function(found))
        try:
            yield
        finally:
            setattr(owner, name, found)
        return

    @functools.wraps(original)
    def replacement(*arguments: Any, **named: Any) -> Any:
        return function(original, *arguments, **named)

    kind = type(found) if isinstance(found, (staticmethod, classmethod)) else None
    inherited = inspect.isclass(owner) and name not in vars(owner)
    setattr(owner, name, kind(replacement) if kind else replacement)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, found)
