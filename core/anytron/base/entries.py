"""One line of what ``anytron doctor`` finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from anytron.base.errors import AnytronError

if TYPE_CHECKING:
    from collections.abc import Iterable

Status = Literal["ok", "warn", "fail", "skip"]
"""``fail``: a run cannot work, or would compute wrongly. ``warn``: it can, and something is not as it should be.
``skip``: this could not be examined; ``detail`` says why."""

REPORT = "report this, with the output of anytron doctor --json"
_BY_SEVERITY: tuple[Status, ...] = ("skip", "ok", "warn", "fail")


@dataclass(frozen=True)
class Entry:
    """Something that was examined.

    Attributes:
        name: ``topic.what``, for example ``versions.torch``.
        status: What follows for a run.
        detail: What was found.
        fix: The command or setting that cures it; empty if nothing is wrong.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""

    @property
    def topic(self) -> str:
        """The first part of the name."""
        return self.name.partition(".")[0]

    def as_json(self) -> dict[str, str]:
        """The four fields."""
        return asdict(self)


def worst(statuses: Iterable[Status]) -> Status:
    """Give the worst of several statuses; ``skip`` if there are none."""
    return max(statuses, key=_BY_SEVERITY.index, default="skip")


def of_error(name: str, error: BaseException, status: Status = "fail") -> Entry:
    """Turn an error into an entry: what and why as the detail, and its fix."""
    if isinstance(error, AnytronError):
        why = f" {error.why}" if error.why else ""
        return Entry(name, status, f"{error.headline}{why}", error.fix)
    return Entry(name, status, f"{type(error).__name__}: {error}", REPORT)
