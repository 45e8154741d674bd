"""Limit the size of OmegaConf's interpolations before any is resolved: ``${a}${a}``, thirty levels deep, is a gigabyte.

OmegaConf resolves a value again for each reference to it, so that its work grows with the resolved text. Here the size
of that text is computed from the unresolved file, and each value is visited once.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LARGEST = 2**20
"""Most characters that all references together may resolve to; usual configurations have thousands."""
DEEPEST_CHAIN = 32
"""Most keys in a chain of references."""
_INNERMOST = re.compile(r"\$\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\s*oc\.env\s*:\s*['\"]?(\w*)")
_OF_ENVIRONMENT = re.compile(r"\s*oc\.(?:decode|create)\s*:\s*\Z")
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\\$\{")  # OmegaConf makes text of it
_FOUND = "\0"  # stands for a reference, in what is around it


@dataclass(frozen=True)
class Size:
    """Size of a value after its references are resolved.

    Attributes:
        characters: Length of its text, resolved.
        depth: Number of keys in the value's longest chain of references.
        secret: Whether the value contains, directly or by reference, the value of an environment variable. It is also
            True where that cannot be known, because the name in a reference is itself a reference.
    """

    characters: int = 0
    depth: int = 0
    secret: bool = False


def measure(values: Any, place_of: Callable[[str], str]) -> set[str]:
    """Refuse a configuration whose interpolations are too long, chained too deeply, or circular.

    Args:
        values: The configuration as it stands: mappings and lists, interpolations as text.
        place_of: Function that returns where a key was set.

    Returns:
        The keys, dotted, whose values come from environment variables, wholly or in part.

    Raises:
        ConfigError: The configuration is refused; the error names the key.
    """
    sizes = _Sizes(values, place_of)
    total, made = sum(map(len, sizes.texts.values())), 0
    for key, references in sizes.references.items():
        made += sum(sizes.of(reference, (key,)).characters for reference in references)
        if made > LARGEST:
            raise _refused(
                key,
                place_of,
                f"the references in the file, up to this key, resolve to more than {LARGEST} characters",
            )
    # What a name that is put together refers to is not known: it may be the next of these, and then all the rest.
    for key, count in sizes.unknown.items():
        total *= 2 * count
        if total > LARGEST:
            raise _refused(key, place_of, f"nested references may resolve to more than {LARGEST} characters")
    return {key for key in sizes.texts if sizes.of(key, ()).secret}


class _Sizes:
    """Sizes of all values: each is computed once."""

    def __init__(self, values: Any, place_of: Callable[[str], str]) -> None:
        self._place_of = place_of
        self._known: dict[str, Size] = {}
        self.texts: dict[str, str] = {}
        self.inside: dict[str, list[str]] = {}
        self._walk(values, "")
        self.references: dict[str, list[str]] = {}
        self.unknown: dict[str, int] = {}
        self._environment: dict[str, int] = {}
        for key, text in self.texts.items():
            if "${" in text:
                self._read(key, text)

    def of(self, key: str, path: tuple[str, ...]) -> Size:
        """The size of the value or the section at a key; ``path`` is the chain of references that leads to it."""
        if key in path:
            raise _refused(path[0], self._place_of, f"it refers to itself: {' -> '.join([*path, key])}")
        if len(path) > DEEPEST_CHAIN:
            raise _refused(path[0], self._place_of, f"the chain of references has more than {DEEPEST_CHAIN} keys")
        if key not in self._known:
            parts = self.inside.get(key)
            below = self.references.get(key, []) if parts is None else parts
            sizes = [self.of(part, (*path, key) if parts is None else path) for part in below]
            own = len(self.texts.get(key, "")) + self._environment.get(key, 0)
            size = Size(
                own + sum(one.characters for one in sizes),
                (parts is None) + max((one.depth for one in sizes), default=0),
                key in self._environment
                or (key in self.unknown and bool(self._environment))
                or any(one.secret for one in sizes),
            )
            if size.depth + len(path) > DEEPEST_CHAIN + 1:
                raise _refused(key, self._place_of, f"the chain of references has more than {DEEPEST_CHAIN} keys")
            self._known[key] = size
        return self._known[key]

    def _walk(self, value: Any, key: str) -> None:
        parts: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            parts = value.items()
        elif isinstance(value, list):
            parts = enumerate(value)
        else:
            self.texts[key] = str(value)
            return
        self.inside[key] = []
        for name, part in parts:
            inner = f"{key}.{name}" if key else str(name)
            self.inside[key].append(inner)
            self._walk(part, inner)

    def _read(self, key: str, text: str) -> None:
        """Find what a text refers to, from the inside out."""
        found: list[str] = []

        def replaced(match: re.Match[str]) -> str:
            name = match[1]
            if variable := _ENVIRONMENT.match(name):
                value = len(os.environ.get(variable[1], ""))
                self._environment[key] = self._environment.get(key, 0) + value
                return "" if _FOUND not in name else _FOUND
            if _OF_ENVIRONMENT.match(name):
                return ""
            if _FOUND in name or ":" in name:
                self.unknown[key] = self.unknown.get(key, 0) + 1
            else:
                found.append(_absolute(name.strip(), key))
            return _FOUND

        text = _ESCAPED.sub(r"\1", text)
        while (shorter := _INNERMOST.sub(replaced, text)) != text:
            text = shorter
        self.references[key] = [name for name in found if name in self.texts or name in self.inside]


def _absolute(name: str, key: str) -> str:
    """The key that a reference means: ``.x`` stands beside it, ``..x`` one level above."""
    plain = re.sub(r"\[\s*([^\]]*?)\s*\]", r".\1", name)
    relative = plain.lstrip(".")
    up = len(plain) - len(relative)
    if not up or name.startswith("["):
        return relative
    around = key.split(".")[:-up]
    return ".".join([*around, relative]) if relative else ".".join(around)


def _refused(key: str, place_of: Callable[[str], str], why: str) -> ConfigError:
    return ConfigError(
        f"The references in {key} cannot be resolved.",
        where=place_of(key),
        why=why,
        fix="write the value itself, or refer to a key that has a plain value: ${section.key}",
    )
