"""Cases of a test that are left to ``tox -e slow``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark import ParameterSet


def slow_but(cases: Iterable[str], *quick: str) -> list[ParameterSet]:
    """All cases, marked slow but for those that the normal suite has."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]
