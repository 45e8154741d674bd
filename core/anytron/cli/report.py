"""``anytron report``: one file of HTML about one or several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.base.files import PRIVATE, exhausted, write_durably
from anytron.cli.output import error_console
from anytron.record.report.page import MARK, render
from anytron.record.report.run import Run, runs_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MOST_RUNS = 24
"""Most runs of a report: more lines of a plot, or columns of a table, cannot be told apart."""


def run_report(paths: Sequence[Path], output: Path) -> None:
    """Write the report and print its path; files that could not be read are named on stderr.

    Args:
        paths: Directories of runs. A run with stages counts as one run per stage; a run given twice is shown once.
        output: The file; an earlier report is replaced.

    Raises:
        ConfigError: A directory is not a run's directory, there are too many runs, or the file cannot be written.
    """
    different = list({run.resolve(): run for path in paths for run in runs_in(path)}.values())
    if len(different) > MOST_RUNS:
        raise ConfigError(
            "There are too many runs for one report.",
            where="command line",
            why=f"{len(different)} runs were given; a report shows at most {MOST_RUNS}",
            fix="write several reports, each of fewer runs and with its own --output",
        )
    _check(output)
    runs = [Run(path) for path in different]
    page = render(runs)
    try:
        write_durably(output, page, PRIVATE)
    except OSError as error:
        raise exhausted(error, str(output)) or ConfigError(
            "The report cannot be written.", where=str(output), why=str(error), fix="choose another file with --output"
        ) from error
    notes = error_console()
    for run in runs:
        for problem in run.problems:
            notes.print(f"warning: {run.path}: {problem}")
    print(f"{output} ({len(page) / 1e6:.2f} MB) shows {len(runs)} run{'s' if len(runs) > 1 else ''}")


def _check(output: Path) -> None:
    """Refuse to replace a file that is not an earlier report."""
    if output.is_dir():
        raise ConfigError(
            "The report cannot be written.",
            where=str(output),
            why="this is a directory",
            fix="give a file with --output",
        )
    if output.is_file():
        with output.open("rb") as file:
            if file.read(len(MARK)) == MARK.encode():
                return
    elif not output.exists():
        return
    raise ConfigError(
        "The output file exists and is not a report.",
        where=str(output),
        why="anytron report replaces only an earlier report",
        fix="choose another file with --output, or delete this one",
    )
