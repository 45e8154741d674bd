"""What starts processes: the executors, their cluster, and which devices their processes will see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, component_names
from anytron.base.results import Result, of_error
from anytron.proof.doctor.live import ProbeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.proof.doctor.live import Live
    from anytron.proof.doctor.subject import Subject


def examine(subject: Subject, live: Live) -> Iterator[Result]:
    """Let every executor that is installed examine what it depends on, each in the process of the probes."""
    for name in component_names(EXECUTORS):
        used = "this run uses it" if name == subject.executor else "this run does not use it"
        try:
            answer = live.ask(f"executor {name}")
        except ProbeError as error:
            yield of_error(f"executors.{name}", error, "failed" if name == subject.executor else "warning")
            continue
        yield Result(f"executors.{name}", "passed", used)
        for row in answer["entries"]:
            yield Result(**row)
