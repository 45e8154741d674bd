"""Run the kit: a process for each level, and another one whenever a check has taken its process down."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Protocol

from anytron.base.errors import AnytronError
from anytron.proof.conformance.levels import rules_of
from anytron.proof.conformance.results import ConformanceReport, RuleResult
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

    from anytron.proof.conformance.rules import Level, Rule
    from anytron.proof.conformance.subject import Source

START_S = 300.0
"""Seconds in which the platform must be opened."""


class Watcher(Protocol):
    """Is told how the kit goes on, for people."""

    def begins(self, rule: Rule) -> None:
        """A rule is going to be checked."""

    def made(self, result: RuleResult) -> None:
        """A rule has been checked."""


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

    def check(self, rule: Rule) -> RuleResult:
        """Check a rule; never raises for what the platform does."""
        start, case = time.monotonic(), ""
        try:
            if self._process is None:
                self._process = IsolatedProcess(self._settings(), self._scratch / "conformance.log")
            process = self._process
            # The limit counts from the beginning of each case.
            process.settings = self._settings(rule.limit_s)
            process.send([(rule.level, rule.name)])
            while True:
                wait([process.connection], max(0.0, process.deadline - time.monotonic()))
                answer = process.receive()
                if isinstance(answer, Gone):
                    self.close()
                    reason = f"It did not end within {rule.limit_s:g} s: " if answer.late else "Its process died: "
                    found = {"case": case, "cases": 1, "seconds": time.monotonic() - start}
                    return RuleResult.failed(rule, reason + answer.why, **found)
                if answer is not None and "at" not in answer:
                    return RuleResult.from_json(answer)
                if answer is not None:
                    case = answer["at"]
        except AnytronError as error:
            self.close()
            return RuleResult.failed(rule, error.headline, difference=error.why, seconds=time.monotonic() - start)

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
            worker="anytron.proof.conformance.worker",
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


def run(
    source: Source, levels: Sequence[Level], scratch: Path, watcher: Watcher, threads: int = 1
) -> ConformanceReport:
    """Check all rules of some levels; whatever goes wrong in one, the others are checked.

    Args:
        source: The platform.
        levels: In order.
        scratch: A directory for logs and for what checks write.
        watcher: Is told how it goes on.
        threads: Processor threads of the checking processes.
    """
    found: dict[Level, list[RuleResult]] = {}
    for level in levels:
        found[level] = []
        with Checker(source, scratch, threads) as checker:
            for rule in rules_of(level):
                watcher.begins(rule)
                found[level].append(checker.check(rule))
                watcher.made(found[level][-1])
    return ConformanceReport(source.platform, found)
