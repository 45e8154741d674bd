"""The result of a check: one type for the conformance kit, ``anytron verify`` and ``anytron doctor``."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from anytron.base.errors import AnytronError, ProcessLost, WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Status = Literal["skipped", "passed", "warning", "failed"]
"""From harmless to bad. ``failed``: a run cannot work, or computes wrongly. ``warning``: it can work, and something is
not as it should be. ``skipped``: the check does not apply here; ``detail`` says why."""
STATUSES: tuple[Status, ...] = get_args(Status)

REPORT = "report this, with the output of anytron doctor --json"


@dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        name: Name of the check; the part before the first dot, if any, is its group: ``versions.torch``.
        status: The outcome.
        detail: What was found or compared, or why the check was skipped.
        fix: The command or setting that solves a failure.
        difference: The largest absolute difference; None if none was measured.
        tolerance: The largest difference allowed; None if none was measured.
        made: Names of the cases that passed; empty if the check has no cases.
        left_out: Why cases were skipped, by case name; empty if the whole check was skipped.
        broken: Name of the smallest case that fails; None if no case does.
        notes: Further lines about a failure, by label.
        seconds: How long the check took.
    """

    name: str
    status: Status
    detail: str = ""
    fix: str = ""
    difference: float | None = None
    tolerance: float | None = None
    made: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    broken: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def group(self) -> str:
        """The part of the name before the first dot; empty without a dot."""
        return self.name.rpartition(".")[0].partition(".")[0]

    @property
    def cases(self) -> int:
        """Number of cases that were run, the failing one included."""
        return len(self.made) + (self.broken is not None)

    @property
    def skipped(self) -> int:
        """Number of skipped cases; 1 if the whole check was skipped."""
        return len(self.left_out) or int(self.status == "skipped")

    @property
    def explanation(self) -> str:
        """The detail, the fix, the failing case and the notes, as lines to print."""
        parts = {"": self.detail, "fix": self.fix, "case": self.broken, **self.notes}
        return "\n".join(f"{label}: {text}" if label else text for label, text in parts.items() if text)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several statuses; ``skipped`` if there are none."""
    return max(statuses, key=STATUSES.index, default="skipped")


def of_error(name: str, error: Exception, status: Status = "failed") -> Result:
    """Make a result from the error that a check raised."""
    return Result(name, status, in_one_line(error), error.fix if isinstance(error, AnytronError) else REPORT)


def in_one_line(error: BaseException) -> str:
    """Return an error in one line, without its fix.

    For a WorkerError, the line has the worker's exception and the path of the log with the traceback; for an exception
    that is not an AnytronError, the innermost source line.
    """
    if not isinstance(error, AnytronError):
        frames = traceback.extract_tb(error.__traceback__)
        place = f", at {frames[-1].line!r} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        message = str(error).strip().splitlines()
        return f"It raised {type(error).__name__}: {message[0] if message else 'without a message'}{place}"
    cause = error if isinstance(error, WorkerError) else error.__cause__
    if isinstance(error, WorkerError):
        reason = "" if isinstance(error, ProcessLost) else _raised(error.why)
    else:
        reason = ": ".join(part for part in (error.where, error.why) if part)
    log = f"(log: {cause.where})" if isinstance(cause, WorkerError) and cause.where else ""
    return " ".join(f"{error.what} {reason} {log}".split())


def _raised(text: str) -> str:
    """Return the exception of a traceback's text, its first line only."""
    after = text.rpartition("Traceback (most recent call last):")[2].splitlines()
    return next((line for line in after if line and not line[0].isspace()), "")
