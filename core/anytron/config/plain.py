"""Bound what was read from a file before anything walks through it: its nesting, and text that cannot be written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DEEPEST = 32
"""Levels of nesting of a configuration or a model's JSON files; published ones have ten."""


def is_too_deep(value: Any, deepest: int = DEEPEST) -> bool:
    """Whether mappings and lists lie in each other more than so many levels deep. Does not recurse."""
    level = [value]
    for _ in range(deepest + 1):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return False
    return True


def is_writable(text: str) -> bool:
    """Whether a string can be written as UTF-8: it has no half of a surrogate pair (JSON's ``ud800``)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string in mappings and lists, with its dotted key; a mapping's own keys come with them."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from strings(name, key) if isinstance(name, str) else ()
            yield from strings(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from strings(part, f"{key}.{index}" if key else str(index))


def _parts(whole: Any) -> Iterator[Any]:
    """The mappings and lists directly inside of one."""
    parts = whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ()
    yield from (part for part in parts if isinstance(part, (dict, list)))
