"""Configurations of runs beside each other, without their secrets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.config.secrets import HIDDEN, is_secret, without_user

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LONGEST = 2000
"""Characters of a value that are shown."""


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a configuration: JSON texts by dotted keys.

    Values of keys that are named like a secret are hidden, and so are users and passwords in addresses.
    """
    return dict(_walk("", config))


def _walk(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, (dict, list)) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in pairs:
            yield from _walk(f"{key}.{name}" if key else str(name), part)
        return
    name = key.rpartition(".")[2]
    yield key, HIDDEN if is_secret(name) and value is not None else shortened(without_user(_text(value)))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Leave out the middle of a text that is too long, and say how much."""
    if len(text) <= longest:
        return text
    end = longest // 3
    begin = longest - end
    return f"{text[:begin]}\n[... {len(text) - longest:,} characters are left out here ...]\n{text[-end:]}"


def compared(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Put configurations beside each other: each key with the value of every run; None where a run has no such key."""
    flat = [settings(config) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [(key, [one.get(key) for one in flat]) for key in keys]
