"""``anytron conformance``: check a platform rule by rule, in a process for each level.

If a check ends its process, the next rule is checked in a new process.
"""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import yaml

from anytron.base.errors import AnytronError, ConfigError
from anytron.base.results import Result, in_one_line
from anytron.cli.output import ScratchDirectory, error_console
from anytron.proof.checks import Report, make
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings
from anytron_conformance.rules import checked_levels, rules_of
from anytron_conformance.subject import Source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

    from anytron.proof.checks import Watcher
    from anytron_conformance.rules import Level, Rule


START_S = 300.0
"""Seconds in which the platform must be opened."""


class Checker:
    """Checks rules in a separate process; if the process ends, the next rule is checked in a new one.

    A context manager: leaving it ends the process.

    Args:
        source: The platform.
        scratch: A directory for logs and other files of checks.
        threads: CPU threads of the process.
    """

    def __init__(self, source: Source, scratch: Path, threads: int = 1) -> None:
        self._source = source
        self._scratch = scratch
        self._threads = threads
        self._process: IsolatedProcess | None = None

    def check(self, rule: Rule) -> Result:
        """Check a rule; errors of the platform become results."""
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
                    reason = (
                        f"The check did not end within {rule.limit_s:g} s: "
                        if answer.late
                        else "The process of the check died: "
                    )
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
    """Check all rules of some levels; a failure in one rule does not stop the others.

    Args:
        source: The platform.
        levels: Levels, in order.
        scratch: A directory for logs and other files of checks.
        watcher: Receives the progress.
        threads: CPU threads of the checking processes.
    """
    found: list[Result] = []
    for level in levels:
        with Checker(source, scratch, threads) as checker:
            found += make(rules_of(level), lambda rule: [checker.check(rule)], watcher)
    return found


def run_conformance(platform: str, options: Sequence[str], levels: Sequence[str], *, as_json: bool) -> bool:
    """Check all rules of some levels, and print the results.

    The standard output has the table and the failures, or the JSON object; progress goes to stderr.

    Returns:
        Whether every rule is kept or was skipped.

    Raises:
        AnytronError: The platform is not installed, its device is absent, or a level or option does not exist.
        KeyboardInterrupt: Ctrl-C. The rules that had been checked are printed; all processes have ended.
    """
    # With all of doctor, which the pytest plugin, a user of Checker alone, does not need.
    from anytron.cli.checks import print_report, progress_of

    asked = checked_levels(levels)
    source = Source(platform, _parsed(options))
    session = source.open()
    notes = error_console()
    notes.print(f"platform: {platform} ({session.probe.reason})")
    with progress_of(notes, {"platform": platform}, as_json=as_json) as watcher:
        watcher.expects(sum(len(rules_of(level)) for level in asked))  # torch: only when nothing has been found wrong

        with ScratchDirectory("conformance", notes) as scratch:
            (scratch.path / "logs").mkdir()
            report = Report(run(source, asked, scratch.path / "logs", watcher), {"platform": platform})
            if not report.passed:
                scratch.keep_logs()
    return print_report(report, as_json=as_json)


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ConfigError(
                f"The option '{option}' does not have the form KEY=VALUE.",
                where="command line",
                fix="write, for example, tile=8",
            )
        found[key] = yaml.safe_load(value)
    return found
