"""tox.ini names what exists: environments that are seldom run would not show it."""

from __future__ import annotations

import re

from tests.house import ROOT


def missing_paths(text: str) -> list[str]:
    """Paths of this repository that a text names, and that do not exist."""
    named = re.findall(r"\b(?:backends|benchmarks|constraints|core|examples|plugins|tests)/[\w/.-]*\w", text)
    return sorted({path for path in named if not (ROOT / path).exists()})


def test_paths_that_tox_names_exist():
    assert missing_paths((ROOT / "tox.ini").read_text(encoding="utf-8")) == []


def test_a_folder_that_has_moved_is_found():
    assert missing_paths("pytest {posargs:tests/core/sinks} tests/core/record") == ["tests/core/sinks"]
