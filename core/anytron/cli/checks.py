"""``anytron doctor``, ``anytron verify`` and ``anytron compare``: make checks, and print their results.

Standard output has tables and the suppliers of the kernels, or one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from anytron.base.components import EXECUTORS, VERIFICATIONS, component_names, load_component
from anytron.base.errors import ConfigError
from anytron.base.files import WEIGHTS, PrivateDirectory
from anytron.base.results import STATUSES
from anytron.cli.output import ScratchDirectory, error_console, kernels_line, print_table
from anytron.config.diagnostics import refuse
from anytron.config.options import chosen_engines
from anytron.proof.checks import Report, Watcher
from anytron.proof.doctor.examination import examine
from anytron.run.preflight.capabilities import comparison_diagnostics, verification_diagnostics
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from anytron.base.results import Result, Status
    from anytron.config.schema import RunConfig


COLORS: dict[Status, str] = {"skipped": "dim", "passed": "green", "warning": "yellow", "failed": "bold red"}


class ProgressBar(Watcher):
    """A bar on a terminal, and a line for each finished check."""

    def __init__(self, notes: Console) -> None:
        self.results: list[Result] = []
        self._notes = notes
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=notes,
            transient=True,
            disable=not notes.is_terminal,
        )
        self._task = self.bar.add_task("", total=None)

    def expects(self, total: int) -> None:
        """Set the number of checks."""
        self.bar.update(self._task, total=total)

    def begins(self, what: str) -> None:
        """Show the check beside the bar."""
        self.bar.update(self._task, description=what)

    def made(self, result: Result) -> None:
        """Print the result as a line, with the reason of a failure, and advance the bar."""
        self.results.append(result)
        case = f"case {result.broken}: " if result.broken else ""
        why = f": {case}{result.detail}" if result.status == "failed" else ""
        self._notes.print(Text.assemble(f"{result.name}: ", _colored(result.status), f", {result.seconds:.1f} s", why))
        self.bar.advance(self._task)


@contextmanager
def progress_of(notes: Console, facts: Mapping[str, Any], *, as_json: bool) -> Iterator[ProgressBar]:
    """Show the progress of checks; after Ctrl-C, print the results so far, and ``facts`` about what is checked."""
    watcher = ProgressBar(notes)
    try:
        with watcher.bar:
            yield watcher
    except KeyboardInterrupt:
        print_report(Report(watcher.results, facts, interrupted=True), as_json=as_json)
        raise


def print_report(report: Report, *, as_json: bool) -> bool:
    """Print a table for each group, the kernels' suppliers where they are known, the failures and the counts.

    Returns:
        Whether no check failed.
    """
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        return report.passed
    for group, members in groupby(report.results, key=lambda result: result.group):
        _print_table(group, list(members))
        print()
    if "kernels" in report.facts:
        print(kernels_line(report.facts["kernels"]))
    for result in report.results:
        if result.status == "failed":
            print(f"{result.name} failed\n{result.explanation}\n")
    counts = report.counts
    line = ", ".join(f"{counts[status]} {status}" for status in reversed(STATUSES))
    print(f"{line}; {counts['cases']} cases made, {counts['cases_skipped']} skipped" if "cases" in counts else line)
    return report.passed


def _print_table(title: str, results: Sequence[Result]) -> None:
    from rich.table import Table

    measured = any(result.tolerance is not None for result in results)
    counted = any(result.made or result.left_out for result in results)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.show_header = measured or counted
    table.add_column("status", no_wrap=True)
    table.add_column("name", no_wrap=True)
    numbers = ["difference", "tolerance"] * measured + ["cases", "skipped"] * counted
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for result in results:
        # Text, not markup: reasons quote brackets, as in anytron[ray].
        detail = Text(result.detail)
        if result.fix and result.status != "passed":
            detail.append(f"\nfix: {result.fix}", style="bold")
        row = [_number(result.difference), _number(result.tolerance)] * measured
        row += [str(result.cases), str(result.skipped or "")] * counted
        table.add_row(_colored(result.status), result.name.removeprefix(f"{title}."), *row, detail)
    print_table(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _colored(status: Status) -> Text:
    return Text(status, COLORS[status])


def run_doctor(path: Path | None, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Examine this machine and print the results.

    Returns:
        Whether no check failed.
    """
    return print_report(Report([*examine(path, overrides)]), as_json=as_json)


def run_verification(path: Path, overrides: Sequence[str], *, shrink: bool = False, as_json: bool) -> bool:
    """Make all checks of ``anytron verify`` for a run, and print their results.

    Nothing is written into ``trainer.output_dir``: the files of the checks, mainly logs of worker processes, lie in a
    temporary directory; the logs are kept if a check fails.

    Args:
        path: The run's configuration; with ``shrink`` also a published ``config.json``, or its directory.
        overrides: Overrides of the configuration.
        shrink: Verify a tiny model with random weights and the shape of the run's model.
        as_json: Print JSON.

    Returns:
        Whether no check failed.

    Raises:
        AnytronError: The configuration, the data or the machine does not allow the run.
    """
    from anytron.proof.shrinking.run import shrink_run

    notes = error_console()
    with ScratchDirectory("verify", notes) as scratch:
        shrunk = shrink_run(path, overrides, scratch.path) if shrink else None
        run = open_run(path, overrides) if shrunk is None else shrunk.open(overrides)
        for line in [*run.lines, *(shrunk.lines if shrunk else ())]:
            notes.print(line)
        refuse([*run.diagnostics, *verification_diagnostics(run.config)])
        executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")

        # torch: only when nothing has been found wrong so far
        from anytron.proof.verification.checks import CHECKS, verify

        trainer = run.config.trainer.model_copy(update={"output_dir": str(scratch.path)})
        config = run.config.model_copy(update={"trainer": trainer})
        facts: dict[str, Any] = {}
        if shrunk is not None:
            shrunk.write_model(config)
            facts = shrunk.facts
        with progress_of(notes, facts, as_json=as_json) as watcher:
            watcher.expects(len(CHECKS))
            report = verify(config, run.session, executor_class, watcher)
        if proposal := _proposal(config, report):
            facts["proposal"] = proposal
        passed = _shown(replace(report, facts={**report.facts, **facts}), scratch, as_json=as_json)
        if not as_json:
            verdict = [] if shrunk is None else [shrunk.verdict(passed=passed)]
            print("".join(f"{line}\n" for line in [*verdict, *proposal]), end="")
        return passed


def run_comparison(path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Make the comparisons of ``anytron compare`` for a run, and print their results.

    Nothing is written into ``trainer.output_dir``; logs of the processes are kept if a comparison fails.

    Args:
        path: The run's configuration.
        overrides: Overrides of the configuration.
        as_json: Print JSON.

    Returns:
        Whether no bits differ, or they may.

    Raises:
        AnytronError: The configuration, the data or the machine does not allow the run.
    """
    notes = error_console()
    with ScratchDirectory("compare", notes) as scratch:
        run = open_run(path, overrides)
        for line in run.lines:
            notes.print(line)
        refuse([*run.diagnostics, *comparison_diagnostics(run.config)])
        executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")

        # torch: only when nothing has been found wrong so far
        from anytron.proof.comparing import CHECKS, compare

        trainer = run.config.trainer.model_copy(update={"output_dir": str(scratch.path)})
        config = run.config.model_copy(update={"trainer": trainer})
        with (
            PrivateDirectory(WEIGHTS) as exchange,
            progress_of(notes, {}, as_json=as_json) as watcher,
            executor_class(config, run.session) as executor,
        ):
            watcher.expects(len(CHECKS))
            report = compare(config, executor, exchange.path, watcher)
        return _shown(report, scratch, as_json=as_json)


def _proposal(config: RunConfig, report: Report) -> list[str]:
    """Lines that say how to prove a model that no test of its engine proves."""
    info = chosen_engines(config.engine.name, config.rollout.engine).get("engine.options")
    propose = None if info is None else info.load_proposal()
    return [] if propose is None else [*propose(config, report)]


def run_verification_of(framework: str, path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Check the engine of another framework, configured by that framework's own file, and print the results.

    Args:
        framework: Name of the framework, as an entry point in :data:`~anytron.base.components.VERIFICATIONS`.
        path: The framework's configuration file.
        overrides: Overrides of that configuration, in the framework's syntax.
        as_json: Print JSON.

    Returns:
        Whether no check failed.

    Raises:
        AnytronError: No installed distribution verifies the framework, or its engine cannot be built.
    """
    if framework not in component_names(VERIFICATIONS):
        raise ConfigError(
            f"A configuration of {framework} cannot be verified.",
            where=f"--{framework}",
            why=f"anytron-{framework} is not installed",
            fix=f"pip install anytron-{framework}",
        )
    notes = error_console()
    verify = load_component(VERIFICATIONS, framework, f"--{framework}")
    with ScratchDirectory("verify", notes) as scratch:
        with progress_of(notes, {}, as_json=as_json) as watcher:
            report = verify(path, overrides, scratch.path, watcher)
        return _shown(report, scratch, as_json=as_json)


def _shown(report: Report, scratch: ScratchDirectory, *, as_json: bool) -> bool:
    """Print a report, and keep the logs if a check has failed; return whether no check failed."""
    if not report.passed:
        scratch.keep_logs()
    return print_report(report, as_json=as_json)
