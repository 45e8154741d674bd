"""Tests of other projects: what each looks at, which published faults it could see, and which it notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "rivals.json"
RUN_WITH = "run with the fault"
SEEN = ("read", "run", RUN_WITH)
"""How a test was judged: its source was read; it was run here too; it was run where the fault had been made."""


def suites() -> list[dict[str, Any]]:
    """Return the suites, each with its tests, as the file holds them."""
    found: list[dict[str, Any]] = json.loads(FILE.read_text("utf-8"))
    return found


def named(suite: dict[str, Any], field: str) -> set[str]:
    """Return the faults that tests of a suite name in a field: ``applies_to`` or ``notices``."""
    return {name for test in suite["tests"] for name in test[field]}


def table() -> str:
    """Return the suites: how many tests, how many were run, how many faults they could see, and which they miss."""
    lines = ["", "| tests | in all | run here | faults in what they call | noticed |", "|---|---|---|---|---|"]
    for suite in suites():
        tests = suite["tests"]
        ran = sum(test["seen"] != "read" for test in tests)
        files = list(dict.fromkeys(test["link"] for test in tests))
        links = ", ".join(f"[{number}]({link})" for number, link in enumerate(files, start=1))
        could, does = named(suite, "applies_to"), named(suite, "notices")
        missed = f"; not {', '.join(sorted(could - does))}" if could - does else ""
        lines.append(f"| {suite['name']} ({links}) | {len(tests)} | {ran} | {len(could)} | {len(does)}{missed} |")
    return "\n".join(lines) + "\n\n"
