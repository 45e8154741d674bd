"""``anytron verify``: print the results of the checks as a table or as JSON.

Standard output has the table and the suppliers of the kernels, or the JSON list; progress goes to the error output.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.text import Text

from anytron.base.components import EXECUTORS, VERIFICATIONS, component_names, load_component
from anytron.base.errors import ConfigError
from anytron.cli.output import error_console
from anytron.cli.scratch import ScratchDirectory
from anytron.cli.tables import colored, kernels_line, print_table
from anytron.config.diagnostics import refuse
from anytron.run.preflight.capabilities import verification_diagnostics
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.status import Status

    from anytron.proof.verification.report import CheckResult, Report


def run_verification(path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Make all checks and print what they found.

    Nothing is written into ``trainer.output_dir``: the files of the checks, mainly logs of worker processes, lie in a
    temporary directory; the logs are kept if a check fails.

    Returns:
        Whether no check failed.

    Raises:
        AnytronError: The configuration, the data or the machine is not fit for the run.
    """
    notes = error_console()
    run = open_run(path, overrides)
    for line in run.lines:
        notes.print(line)
    refuse([*run.diagnostics, *verification_diagnostics(run.config)])
    config, session = run.config, run.session
    executor_class = load_component(EXECUTORS, config.executor.kind, "executor.kind")

    from anytron.proof.verification.checks import verify  # torch: only when nothing has been found wrong so far

    with ScratchDirectory("verify", notes) as scratch:
        trainer = config.trainer.model_copy(update={"output_dir": str(scratch.path)})
        config = config.model_copy(update={"trainer": trainer})
        with notes.status("") as status:
            report = verify(config, session, executor_class, _Watcher(notes, status))
        return _shown(report, scratch, as_json=as_json)


def run_verification_of(framework: str, path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Check the engine of another framework as that one's own configuration says, and print what was found.

    Args:
        framework: Its name among the entry points of :data:`~anytron.base.components.VERIFICATIONS`.
        path: Its configuration.
        overrides: Of it, in its grammar.
        as_json: Print JSON.

    Returns:
        Whether no check failed.

    Raises:
        AnytronError: Nothing that is installed verifies it, or the engine cannot be built.
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
        with notes.status("") as status:
            report = verify(path, overrides, scratch.path, _Watcher(notes, status))
        return _shown(report, scratch, as_json=as_json)


def _shown(report: Report, scratch: ScratchDirectory, *, as_json: bool) -> bool:
    """Print a report, and keep the logs if a check has failed; say whether none has."""
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print_table(report.results)
        if report.kernels:
            print(kernels_line(report.kernels))
    if not report.passed:
        scratch.keep_logs()
    return report.passed


class _Watcher:
    """Shows on a terminal what is being done, and prints a line for each check that is over."""

    def __init__(self, notes: Console, status: Status) -> None:
        self._notes = notes
        self._status = status

    def begins(self, what: str) -> None:
        self._status.update(f"{what} ...")

    def made(self, result: CheckResult, seconds: float) -> None:
        self._notes.print(Text.assemble(f"{result.check}: ", colored(result.status.value), f", {seconds:.1f} s"))


def _print_table(results: Sequence[CheckResult]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, justify in (("check", "left"), ("max abs diff", "right"), ("tolerance", "right"), ("status", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("detail")
    for result in results:
        table.add_row(
            result.check,
            _number(result.max_abs_diff),
            _number(result.tolerance),
            colored(result.status.value),
            result.detail,
        )
    print_table(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
