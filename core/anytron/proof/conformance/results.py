"""What the kit found: one result per rule, and the report of all levels."""

from __future__ import annotations

import platform as machine
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from anytron.base.version import __version__
from anytron.proof.verification.report import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anytron.proof.conformance.rules import Level, Rule


@dataclass(frozen=True)
class RuleResult:
    """What came of one rule.

    Attributes:
        rule: Its name.
        level: Its level.
        status: What came of it.
        contract: The sentence of the contract.
        docs: Where it is explained.
        cases: Number of cases that were made, the failing one included.
        skipped: Number of cases that the platform declares not to do or this machine cannot make.
        help: What was done to find out, and what usually breaks it: all that the documentation says of the rule
            besides. Empty if the rule is not broken.
        reason: What was found wrong, or why cases were skipped; empty if all cases passed.
        case: The smallest case that fails; empty if none does, or if the rule has one case only.
        difference: How far off it is, and what is allowed.
        made: Names of the cases that passed.
        left_out: Why cases were skipped, by their names; empty if the rule as a whole was.
        seconds: How long it took.
    """

    rule: str
    level: Level
    status: Status
    contract: str
    docs: str
    cases: int = 0
    skipped: int = 0
    help: str = ""
    reason: str = ""
    case: str = ""
    difference: str = ""
    made: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def failed(cls, rule: Rule, reason: str, **found: Any) -> RuleResult:
        """Make the result of a rule that is broken, or could not be checked."""
        named = {"help": rule.help, "reason": reason, **found}
        return cls(rule.name, rule.level, Status.FAILED, rule.contract, rule.docs, **named)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RuleResult:
        """Undo :meth:`as_json`."""
        return cls(**{**values, "status": Status(values["status"])})

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "status": self.status.value, "seconds": round(self.seconds, 3)}

    @property
    def explanation(self) -> str:
        """All that is known of a failure, or why it was skipped, in lines for people."""
        parts = (
            ("", self.reason),
            ("case: ", self.case),
            ("difference: ", self.difference),
            ("contract: ", self.contract),
            ("checked: ", " ".join(self.help.replace("``", "`").split())),
            ("docs: ", self.docs),
        )
        return "\n".join(f"{label}{text}" for label, text in parts if text)


@dataclass(frozen=True)
class ConformanceReport:
    """The results of all levels.

    Attributes:
        platform: The platform's name.
        levels: Results by level, in order.
        interrupted: Ctrl-C came before all rules had been checked.
    """

    platform: str
    levels: Mapping[Level, list[RuleResult]]
    interrupted: bool = False

    @classmethod
    def of(cls, platform: str, results: Iterable[RuleResult], *, interrupted: bool = False) -> ConformanceReport:
        """Make the report of a platform of its results, which are in order."""
        levels = {level: [*members] for level, members in groupby(results, key=lambda result: result.level)}
        return cls(platform, levels, interrupted)

    @property
    def results(self) -> list[RuleResult]:
        """Of all levels."""
        return [result for results in self.levels.values() for result in results]

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return all(result.status is not Status.FAILED for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        """Rules by status; cases made, and cases skipped."""
        by_status = {one.value: sum(result.status is one for result in self.results) for one in Status}
        made, skipped = (sum(getattr(one, name) for one in self.results) for name in ("cases", "skipped"))
        return {**by_status, "cases": made, "cases_skipped": skipped}

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            "platform": self.platform,
            "versions": versions(),
            "levels": [
                {"level": level, "rules": [result.as_json() for result in results]}
                for level, results in self.levels.items()
            ],
            "counts": self.counts,
            "interrupted": self.interrupted,
        }


def versions() -> dict[str, str]:
    """The versions that a report depends on."""
    found = {"anytron": __version__, "python": machine.python_version()}
    for package in ("torch", "megatron-core", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # noqa: PERF203 - a platform may be tested without an engine
            continue
    return found
