"""The plugins, the platform that was chosen, and what it has decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.results import Result, of_error
from anytron.device.loading import State, survey_plugins
from anytron.device.platform import decisions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.results import Status
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject) -> Iterator[Result]:
    """Give the state of each plugin."""
    configured = None if subject.run is None else subject.run.platform.name
    for report in survey_plugins(configured).reports:
        detail = f"{report.state.value}: {report.reason} ({report.distribution} {report.version})"
        status: Status = "failed" if report.refused else "warning" if report.state is State.INCOMPATIBLE else "passed"
        yield Result(f"plugins.{report.name}", status, detail, report.remedy if status != "passed" else "")


def examine_platform(subject: Subject) -> Iterator[Result]:
    """Give the active platform with the reason, its decisions, and what is hidden."""
    if subject.session is None:
        assert subject.broken is not None
        yield of_error("platform.choice", subject.broken)
        return
    session = subject.session
    yield Result("platform.choice", "passed", f"{session.platform.name}: {session.choice_reason}")
    for decision in decisions_of(session.platform):
        yield Result(f"platform.{decision.name}", "passed", f"{decision.value}: {decision.reason}")
    for name in session.hidden:
        yield Result(f"platform.hidden.{name}", "passed", "hidden from all processes: it belongs to another device")
