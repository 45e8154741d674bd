"""All that a run would find wrong with its configuration, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.entries import Entry, of_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.entries import Status
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject) -> Iterator[Entry]:
    """Give what ``anytron train`` would say of the configuration on this machine."""
    if subject.path is None:
        yield Entry("configuration.file", "skip", "no CONFIG was given: the default engines are examined")
    elif subject.misread is not None and str(subject.misread) == str(subject.broken):
        yield Entry("configuration.file", "skip", "no more of it can be checked: platform.choice says why")
    elif subject.misread is not None:
        yield of_error("configuration.file", subject.misread)
    else:
        yield Entry("configuration.file", "ok", f"{subject.path}: engine {subject.engine}, rollout {subject.rollout}")
    for one in subject.diagnostics or ():
        status: Status = "fail" if one.severity == "error" else "warn"
        place = f" ({one.place})" if one.place else ""
        yield Entry(f"configuration.{one.key or 'run'}", status, f"{one.message}{place}", one.fix)
