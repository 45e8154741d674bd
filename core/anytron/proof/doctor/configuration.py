"""All that a run would find wrong with its configuration, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.results import Result, of_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.results import Status
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject) -> Iterator[Result]:
    """Give what ``anytron train`` would say of the configuration on this machine."""
    if subject.path is None:
        yield Result("configuration.file", "skipped", "no CONFIG was given: the default engines are examined")
    elif subject.misread is not None and str(subject.misread) == str(subject.broken):
        yield Result("configuration.file", "skipped", "no more of it can be checked: platform.choice says why")
    elif subject.misread is not None:
        yield of_error("configuration.file", subject.misread)
    else:
        yield Result(
            "configuration.file", "passed", f"{subject.path}: engine {subject.engine}, rollout {subject.rollout}"
        )
    for one in subject.diagnostics or ():
        status: Status = "failed" if one.severity == "error" else "warning"
        place = f" ({one.place})" if one.place else ""
        yield Result(f"configuration.{one.key or 'run'}", status, f"{one.message}{place}", one.fix)
