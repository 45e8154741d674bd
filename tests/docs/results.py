"""What was measured for the support matrix: files in ``docs/reference/results``, and what they say."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.house import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FOLDER = ROOT / "docs" / "reference" / "results"
NOT_RUN = "not run"
"""Of what has no result."""


@dataclass(frozen=True)
class Measured:
    """One measurement, as its file has it.

    Attributes:
        command: What was run, for people.
        date: When, in UTC: ``2026-11-23``.
        seconds: How long it took.
        versions: Of the packages that it depends on.
        found: The report of the kit (``anytron conformance --json``), or the outcomes of tests by their ids.
    """

    command: str
    date: str
    seconds: int
    versions: dict[str, str]
    found: dict[str, Any]

    def write(self, name: str) -> None:
        """Write the file."""
        FOLDER.mkdir(exist_ok=True)
        path(name).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @property
    def rules(self) -> list[dict[str, Any]]:
        """The rules of the kit's report."""
        rules: list[dict[str, Any]] = self.found["results"]
        return rules


def path(name: str) -> Path:
    """The file of a measurement."""
    return FOLDER / f"{name}.json"


def measured(name: str) -> Measured | None:
    """Read a measurement; None if nobody has made it."""
    return Measured(**json.loads(path(name).read_text(encoding="utf-8"))) if path(name).exists() else None


def of_test(one: Measured | None, test: str) -> str:
    """What became of a test: of all its cases, unless its id names one."""
    outcomes = {} if one is None else one.found
    return worst([outcome for name, outcome in outcomes.items() if test in (name, name.partition("[")[0])])


def of_case(one: Measured | None, rule: str, case: str) -> str:
    """What the kit found in one case of a rule."""
    found = next((each for each in one.rules if each["name"] == rule), None) if one is not None else None
    if found is None:
        return NOT_RUN
    if case in found["made"]:
        return "passed"
    if case in found["left_out"] or found["status"] == "skipped":
        return "skipped"
    return "failed" if found["status"] == "failed" and found["broken"] in (case, "") else NOT_RUN


def worst(results: Iterable[str]) -> str:
    """The worst of several results: all must have passed."""
    found = set(results)
    return next((one for one in ("failed", NOT_RUN, "skipped", "passed") if one in found), NOT_RUN)
