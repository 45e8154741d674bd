"""Prepare configurations and workers of runs for a report: side by side, and without secrets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.config.dump import HIDDEN, is_secret, without_user

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


LONGEST = 2000
"""Largest number of characters of a value that are shown."""


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a configuration as JSON texts, by dotted key.

    Values of keys that are named like a secret are hidden, and so are users and passwords in URLs.
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
    """Shorten a text that is too long: its middle is replaced by the number of characters left out."""
    if len(text) <= longest:
        return text
    end = longest // 3
    begin = longest - end
    return f"{text[:begin]}\n[... {len(text) - longest:,} characters are left out here ...]\n{text[-end:]}"


def compared(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return each key with its value in every configuration; None where a configuration lacks the key."""
    flat = [settings(config) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    return [(key, [one.get(key) for one in flat]) for key in keys]


_PATCH = ("id", "outcome", "target", "reason", "detail")


def describe_workers(workers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Describe workers for people; workers of a role with the same description are listed together.

    Args:
        workers: The reports of workers by role, as in ``patches.json``.

    Returns:
        For each kind of worker ``role``, ``ranks``, ``facts`` (pairs of texts) and ``patches`` (dictionaries of texts).
    """
    found = []
    for role, ranks in workers.items():
        groups: dict[str, list[str]] = {}
        for place, rank in enumerate(ranks):
            said = json.dumps({key: value for key, value in rank.items() if key != "rank"}, sort_keys=True)
            groups.setdefault(said, []).append(str(rank.get("rank", place)))
        for said, numbers in groups.items():
            rank = json.loads(said)
            patches = rank.pop("patches", [])
            found.append(
                {
                    "role": role,
                    "ranks": _numbers(numbers),
                    "facts": [[key.replace("_", " "), _said(value)] for key, value in rank.items() if value],
                    "patches": [
                        {key: _said(patch.get(key, "")) for key in _PATCH}
                        for patch in (patches if isinstance(patches, list) else [])
                        if isinstance(patch, dict)
                    ],
                }
            )
    return found


def devices(workers: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the devices that the run trains on: ``8 x Ascend910B2``."""
    counted: dict[str, int] = {}
    for rank in workers.get("trainer", ()):
        name = str(rank.get("device", "unknown device"))
        counted[name] = counted.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counted.items())


def _numbers(ranks: Sequence[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks: {shortened(', '.join(ranks), 60)}"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_said(part)}" for key, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(_said, value))
    return shortened(value if isinstance(value, str) else json.dumps(value))
