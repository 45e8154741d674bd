"""What the workers of a run said of themselves: on which devices, with which kernels, versions and patches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.record.report.settings import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PATCH = ("id", "outcome", "target", "reason", "detail")


def describe_workers(workers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Describe workers for people; those of a role that say the same stand together.

    Args:
        workers: By role, as ``patches.json`` has them.

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
    """Say in a few words what the run trains on: ``8 x Ascend910B2``."""
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
