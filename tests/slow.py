"""Cases of a test that are left to ``tox -e slow``, by name or all but a number of them, and to ``tox -e families``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from _pytest.mark import ParameterSet


def slow_but(cases: Iterable[str], *quick: str) -> list[ParameterSet]:
    """All cases, marked slow but for those that the normal suite has."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark cases of tests with ``@pytest.mark.some(count)`` slow, but for ``count`` of each test.

    The cases that stay are evenly spaced and the same in every run; the last one is among them.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        others = item.get_closest_marker("slow") or item.get_closest_marker("families")
        if item.get_closest_marker("some") is not None and others is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        (count,) = of_test[0].get_closest_marker("some").args
        stay = kept(len(of_test), count)
        for place, item in enumerate(of_test):
            if place not in stay:
                item.add_marker(pytest.mark.slow)


def kept(cases: int, count: int) -> Sequence[int]:
    """Return places of cases, evenly spaced; the last one is among them."""
    count = min(count, cases)
    return sorted(cases - 1 - step * cases // count for step in range(count))


def without_families(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items without those that are left to ``tox -e families`` and are not slow besides."""
    return [item for item in items if not item.get_closest_marker("families") or item.get_closest_marker("slow")]
