"""Run the kit: a process for each level, and another one whenever a check has taken its process down."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from anytron.base.errors import AnytronError
from anytron.base.results import Result, in_one_line
from anytron.proof.checks import make
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings
from anytron_conformance.levels import rules_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

    from anytron.proof.checks import Watcher
    from anytron_conformance.rules import Level, Rule
    from anytron_conformance.subject import Source

START_S = 300.0
"""Seconds in which the platform must be opened."""


class Checker:
    """Checks rules in a process of its own; whatever becomes of that, the next rule is checked in a whole one.

    A context manager: leaving ends the process.

    Args:
        source: The platform.
        scratch: A directory for logs and for what checks write.
        threads: Processor threads of the process.
    """

    def __init__(self, source: Source, scratch: Path, threads: int = 1) -> None:
        self._source = source
        self._scratch = scratch
        self._threads = threads
        self._process: IsolatedProcess | None = None

    def check(self, rule: Rule) -> Result:
        """Check a rule; never raises for what the platform does."""
        case = ""
        try:
            if self._process is None:
                self._process = IsolatedProcess(self._settings(), self._scratch / "conformance.log")
            process = self._process
            # The limit counts from the beginning of each case.
            process.settings = self._settings(rule.limit_s)
            process.send([(rule.level, rule.title)])
            while True:
                wait([process.connection], max(0.0, process.deadline - time.monotonic()))
                answer = process.receive()
                if isinstance(answer, Gone):
                    self.close()
                    reason = f"It did not end within {rule.limit_s:g} s: " if answer.late else "Its process died: "
                    return rule.failed(reason + answer.why, broken=case)
                if answer is not None and "at" not in answer:
                    return Result(**answer)
                if answer is not None:
                    case = answer["at"]
        except AnytronError as error:
            self.close()
            return rule.failed(in_one_line(error))

    def close(self) -> None:
        """End the process; the next rule gets another one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _settings(self, limit_s: float = START_S) -> ProcessSettings:
        return ProcessSettings(
            title="A process of the conformance kit",
            where=f"platform {self._source.platform}",
            worker="anytron_conformance.worker",
            start={
                "platform": self._source.platform,
                "options": dict(self._source.options),
                "scratch": str(self._scratch),
                "threads": self._threads,
            },
            timeout_s=limit_s,
            memory_gib=None,
            start_timeout_s=START_S,
            tells=True,
        )


def run(source: Source, levels: Sequence[Level], scratch: Path, watcher: Watcher, threads: int = 1) -> list[Result]:
    """Check all rules of some levels; whatever goes wrong in one, the others are checked.

    Args:
        source: The platform.
        levels: In order.
        scratch: A directory for logs and for what checks write.
        watcher: Is told how it goes on.
        threads: Processor threads of the checking processes.
    """
    found: list[Result] = []
    for level in levels:
        with Checker(source, scratch, threads) as checker:
            found += make(rules_of(level), lambda rule: [checker.check(rule)], watcher)
    return found
