"""The changes to third-party code that a training rank would make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.entries import Entry
from anytron.patches import Verdict
from anytron.preflight.planned_patches import planned_patches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.doctor.subject import Subject


def examine(subject: Subject) -> Iterator[Entry]:
    """Give the verdict on each patch."""
    if subject.session is None:
        yield Entry("patches.all", "skip", "no platform is active")
        return
    rows = planned_patches(subject.session, engine=subject.engine, rollout_engine=subject.rollout)
    for row in rows:
        detail = f"{row['verdict']}: {row['target']} ({row['reason']}). {row['purpose']}"
        missing = row["verdict"] == Verdict.MISSING.value
        status = "fail" if missing and row["required"] else "warn" if missing else "ok"
        fix = f"install another version of {row['target'].partition(':')[0].partition('.')[0]}" if missing else ""
        yield Entry(f"patches.{row['id']}", status, detail, fix)
    if not rows:
        yield Entry("patches.none", "ok", f"nothing is patched for the engine {subject.engine}")
