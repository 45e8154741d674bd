"""``anytron conformance``: check a platform against the contract, rule by rule."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from anytron.base.errors import ConfigError
from anytron.cli.output import error_console
from anytron.cli.scratch import ScratchDirectory
from anytron.cli.tables import colored, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from anytron.proof.conformance.results import ConformanceReport, RuleResult
    from anytron.proof.conformance.rules import Rule


def run_conformance(platform: str, options: Sequence[str], levels: Sequence[str], *, as_json: bool) -> bool:
    """Check all rules of some levels, and print what came of them.

    The standard output has the table and the failures, or the JSON object; progress goes to the error output.

    Returns:
        Whether no rule is broken.

    Raises:
        AnytronError: The platform is not installed or its device not there; there is no such level or option.
        KeyboardInterrupt: Ctrl-C. The rules that had been checked are printed; all processes have ended.
    """
    from anytron.proof.conformance.levels import checked_levels, rules_of
    from anytron.proof.conformance.results import ConformanceReport
    from anytron.proof.conformance.subject import Source

    asked = checked_levels(levels)
    source = Source(platform, _parsed(options))
    session = source.open()
    notes = error_console()
    notes.print(f"platform: {platform} ({session.probe.reason})")
    watcher = _Watcher(notes)
    try:
        total = sum(len(rules_of(level)) for level in asked)  # torch: only when nothing has been found wrong so far

        from anytron.proof.conformance.run import run

        with ScratchDirectory("conformance", notes) as scratch:
            logs = scratch.path / "logs"
            logs.mkdir()
            with watcher.counting(total):
                report = run(source, asked, logs, watcher)
            if not report.passed:
                scratch.keep_logs()
    except KeyboardInterrupt:
        _print_report(ConformanceReport.of(platform, watcher.results, interrupted=True), as_json=as_json)
        raise
    _print_report(report, as_json=as_json)
    return report.passed


class _Watcher:
    """A bar on a terminal, and a line for each rule that is over.

    Attributes:
        results: Of these rules, in their order.
    """

    def __init__(self, notes: Console) -> None:
        self.results: list[RuleResult] = []
        self._notes = notes
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=notes,
            transient=True,
            disable=not notes.is_terminal,
        )

    def begins(self, rule: Rule) -> None:
        self._bar.update(self._task, description=f"{rule.level}/{rule.name}")

    def made(self, result: RuleResult) -> None:
        self.results.append(result)
        status, seconds = result.status.value, f"{result.seconds:.1f} s"
        self._notes.print(Text.assemble(f"{result.level}/{result.rule}: ", colored(status), f", {seconds}"))
        self._bar.advance(self._task)

    @contextmanager
    def counting(self, total: int) -> Iterator[None]:
        """Show the bar, of so many rules."""
        self._task = self._bar.add_task("", total=total)
        with self._bar:
            yield


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise ConfigError(f"'{option}' is no KEY=VALUE.", where="command line", fix="write, for example, tile=8")
        found[key] = yaml.safe_load(value)
    return found


def _print_report(report: ConformanceReport, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        return

    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("level", "rule", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "skipped"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for result in report.results:
        status = result.status.value
        counted = (str(result.cases), str(result.skipped or ""))
        why = result.reason.splitlines()[0] if result.reason else ""
        table.add_row(result.level, result.rule, colored(status), *counted, why)
    print_table(table)
    for result in report.results:
        if result.status.value == "failed":
            print(f"\n{result.level}/{result.rule} failed\n{result.explanation}")
    counts = report.counts
    print(
        f"\n{counts['passed']} rules passed, {counts['failed']} failed, {counts['skipped']} skipped; "
        f"{counts['cases']} cases made, {counts['cases_skipped']} skipped"
    )
