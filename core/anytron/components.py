"""Engines and executors by name: classes that distributions offer through entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from anytron.errors import ConfigError, did_you_mean


def component_names(group: str) -> list[str]:
    """List the names that installed distributions offer in an entry-point group, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def require_component(group: str, name: str, key: str) -> None:
    """Check, without importing it, that exactly one installed distribution offers ``name``.

    Args:
        group: Entry-point group, for example ``anytron.executors``.
        name: Name in that group.
        key: The configuration key that asks for it, for the error.

    Raises:
        ConfigError: None offers it, or several do.
    """
    _find(group, name, key)


def load_component(group: str, name: str, key: str) -> Any:
    """Import what an entry point names.

    Args:
        group: Entry-point group.
        name: Name in that group.
        key: The configuration key that asks for it, for the error.

    Returns:
        The object, usually a class.

    Raises:
        ConfigError: None offers it, or several do.
        Exception: Whatever the import of the module raises, as it is.
    """
    return _find(group, name, key).load()


def _find(group: str, name: str, key: str) -> Any:
    # A path that is listed twice (an editable install beside PYTHONPATH) shows one entry point twice.
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if len(found) == 1:
        return next(iter(found.values()))
    where = f"{key} (entry-point group {group})"
    if found:
        raise ConfigError(
            f"Several installed distributions offer {name!r}.",
            where=where,
            why="they name different classes: " + ", ".join(sorted(found)),
            fix="uninstall all but one of them",
        )
    known = component_names(group)
    raise ConfigError(
        f"No installed distribution offers {name!r}.",
        where=where,
        why=f"installed are: {', '.join(known) or 'none'}",
        fix=did_you_mean(name, known) or f"set {key} to one of them, or install the one that offers it",
    )
