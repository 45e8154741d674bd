"""Hold the results of the checks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from anytron.base.errors import ProcessLost, WorkerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.base.errors import AnytronError


class Status(str, Enum):
    """The outcome of a check, and of a rule of the conformance kit."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It does not apply here: the platform declares not to do it, or this machine or run cannot. It says why."""


@dataclass(frozen=True)
class CheckResult:
    """One line of the report.

    Attributes:
        check: The name of the check.
        max_abs_diff: The largest absolute difference; None if it was not measured.
        tolerance: The largest difference allowed; None if nothing was measured.
        status: The outcome.
        detail: What was compared, or why it was not.
    """

    check: str
    max_abs_diff: float | None
    tolerance: float | None
    status: Status
    detail: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True)
class Report:
    """The results of all checks.

    Attributes:
        results: One for each check.
        kernels: The plugins that supplied each kernel, see :meth:`anytron.device.hooks.facade.Hooks.suppliers`.
    """

    results: list[CheckResult]
    kernels: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(result.status is not Status.FAILED for result in self.results)

    def as_json(self) -> list[dict[str, Any]]:
        """Return one JSON object for each check; each repeats ``kernels``, which are the same for all checks."""
        return [{**result.as_json(), "kernels": dict(self.kernels)} for result in self.results]


class Watcher(Protocol):
    """Is told how the checks go on, for people."""

    def begins(self, what: str) -> None:
        """Something begins: a check, by its name, or what comes before them."""

    def made(self, result: CheckResult, seconds: float) -> None:
        """A check is over; it took so long."""


def measured(check: str, difference: float, tolerance: float, detail: str) -> CheckResult:
    """Make the result of a check that measured a difference; NaN fails."""
    status = Status.PASSED if difference <= tolerance else Status.FAILED
    return CheckResult(check, difference, tolerance, status, detail)


def skipped(check: str, why: str) -> CheckResult:
    """Make the result of a check that does not apply here."""
    return CheckResult(check, None, None, Status.SKIPPED, why)


def failed(check: str, why: str) -> CheckResult:
    """Make the result of a check that ended in an error."""
    return CheckResult(check, None, None, Status.FAILED, why)


def joined(results: Sequence[CheckResult]) -> CheckResult:
    """Make one result of those of several models, the critic's last: the worst, with what all of them say."""
    if len(results) == 1:
        return results[0]
    worst = max(results, key=lambda one: (one.status is Status.FAILED, used(one.max_abs_diff, one.tolerance)))
    policy, critic = (one.detail for one in results)
    return replace(worst, detail=f"{policy}; the critic: {critic}")


def used(difference: float | None, tolerance: float | None) -> float:
    """Say which part of its tolerance a difference takes; NaN is more than any number."""
    part = (difference or 0.0) / (tolerance or 1.0)
    return math.inf if math.isnan(part) else part


def in_one_line(error: AnytronError) -> str:
    """Say all that an error says, except the traceback or the log's end in it: these are in a file that it names."""
    cause = error if isinstance(error, WorkerError) else error.__cause__
    if isinstance(error, WorkerError):
        reason = "" if isinstance(error, ProcessLost) else _raised(error.why)
    else:
        reason = ": ".join(part for part in (error.where, error.why) if part)
    parts = [error.what, reason, error.fix and f"(fix: {error.fix})"]
    if isinstance(cause, WorkerError) and cause.where:
        parts.append(f"(log: {cause.where})")
    return " ".join(" ".join(parts).split())


def _raised(traceback: str) -> str:
    """Give what was raised, the first line of it, from the text of a traceback."""
    after = traceback.rpartition("Traceback (most recent call last):")[2].splitlines()
    return next((line for line in after if line and not line[0].isspace()), "")
