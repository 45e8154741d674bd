"""The two markers: ``hookspec`` for specifications, ``hookimpl`` for implementations in plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable

PROJECT = "anytron"
KIND = f"{PROJECT}_kind"
"""The attribute by which a specification is recognised."""

Kind = Literal["all", "first", "chain", "merge"]
"""How a hook is called; :mod:`anytron.device.hooks.specs` says what each kind means."""

Specification = TypeVar("Specification", bound="Callable[..., Any]")

hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or a method as the implementation of the hook of its name."""


def hookspec(kind: Kind) -> Callable[[Specification], Specification]:
    """Mark a function as the specification of the hook of its name, called in the way ``kind``."""

    def mark(function: Specification) -> Specification:
        setattr(function, KIND, kind)
        return function

    return mark
