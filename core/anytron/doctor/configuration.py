"""All that a run would find wrong with its configuration, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.entries import Entry, of_error
from anytron.errors import AnytronError
from anytron.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.doctor.subject import Subject


def examine(subject: Subject) -> Iterator[Entry]:
    """Check the configuration as ``anytron train`` does, on this machine."""
    if subject.path is None:
        yield Entry("configuration.file", "skip", "no CONFIG was given: the default engines are examined")
        return
    if subject.misread is not None:
        yield of_error("configuration.file", subject.misread)
        return
    try:
        run = open_run(subject.path, subject.overrides)
    except AnytronError as error:
        yield of_error("configuration.file", error)
        return
    yield Entry("configuration.file", "ok", f"{subject.path}: engine {subject.engine}, rollout {subject.rollout}")
    for one in run.diagnostics:
        status = "fail" if one.severity == "error" else "warn"
        place = f" ({one.place})" if one.place else ""
        yield Entry(f"configuration.{one.key or 'run'}", status, f"{one.message}{place}", one.fix)
