"""The changes to third-party code that a training rank would make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.base.results import Result
from anytron.device.patches import Verdict
from anytron.run.preflight.planned_patches import planned_patches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.results import Status
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject) -> Iterator[Result]:
    """Give the verdict on each patch."""
    rows = planned_patches(subject.opened, engine=subject.engine, rollout_engine=subject.rollout)
    for identifier in dict.fromkeys(row["id"] for row in rows):
        yield _judged(identifier, [row for row in rows if row["id"] == identifier])
    if not rows:
        yield Result("patches.none", "passed", f"nothing is patched for the engine {subject.engine}")


def _judged(identifier: str, targets: list[dict[str, Any]]) -> Result:
    """One entry for a patch: its target, and the classes that supersede it there."""
    missing = [row for row in targets if row["verdict"] == Verdict.MISSING.value]
    verdicts = "; ".join(f"{row['verdict']}: {row['target']} ({row['reason']})" for row in targets)
    status: Status = "passed" if not missing else "failed" if missing[0]["required"] else "warning"
    fix = "install a version in the range of the patch (compatibility says which), or report it to its owner"
    return Result(f"patches.{identifier}", status, f"{verdicts}. {targets[0]['purpose']}", fix if missing else "")
