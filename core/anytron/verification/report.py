"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Status(str, Enum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It cannot be made here; the detail says why."""


@dataclass(frozen=True)
class CheckResult:
    """One line of the report.

    Attributes:
        check: Its name.
        max_abs_diff: The largest absolute difference; None if it was not measured.
        tolerance: What it may be; None where nothing was measured.
        status: Passed, failed or skipped.
        detail: What was compared, or why it was not.
    """

    check: str
    max_abs_diff: float | None
    tolerance: float | None
    status: Status
    detail: str

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "status": self.status.value}


def measured(check: str, difference: float, tolerance: float, detail: str) -> CheckResult:
    """Judge a difference; NaN fails."""
    status = Status.PASSED if difference <= tolerance else Status.FAILED
    return CheckResult(check, difference, tolerance, status, detail)


def skipped(check: str, why: str) -> CheckResult:
    """A check that cannot be made here."""
    return CheckResult(check, None, None, Status.SKIPPED, why)


def failed(check: str, why: str) -> CheckResult:
    """A check that came to nothing: what it needed went wrong."""
    return CheckResult(check, None, None, Status.FAILED, why)
