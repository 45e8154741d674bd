"""The plugins, the platform that was chosen, and what it has decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.entries import Entry, of_error
from anytron.device.loading import State, survey_plugins
from anytron.device.platform import decisions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.entries import Status
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject) -> Iterator[Entry]:
    """Give the state of each plugin."""
    configured = None if subject.run is None else subject.run.platform.name
    for report in survey_plugins(configured).reports:
        detail = f"{report.state.value}: {report.reason} ({report.distribution} {report.version})"
        status: Status = "fail" if report.refused else "warn" if report.state is State.INCOMPATIBLE else "ok"
        yield Entry(f"plugins.{report.name}", status, detail, report.remedy if status != "ok" else "")


def examine_platform(subject: Subject) -> Iterator[Entry]:
    """Give the active platform with the reason, its decisions, and what is hidden."""
    if subject.session is None:
        assert subject.broken is not None
        yield of_error("platform.choice", subject.broken)
        return
    session = subject.session
    yield Entry("platform.choice", "ok", f"{session.platform.name}: {session.choice_reason}")
    for decision in decisions_of(session.platform):
        yield Entry(f"platform.{decision.name}", "ok", f"{decision.value}: {decision.reason}")
    for name in session.hidden:
        yield Entry(f"platform.hidden.{name}", "ok", "hidden from all processes: it belongs to another device")
