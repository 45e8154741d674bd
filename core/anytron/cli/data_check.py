"""``anytron data check``: try a run's rewards on its data."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anytron.base.errors import within
from anytron.base.terminal import one_line
from anytron.cli.output import error_console, result_console
from anytron.config.load import read_stages
from anytron.run.preflight.prepare import prepare, prepare_held_out, prepare_prompts, prepare_validation
from anytron.run.preflight.rehearsal import TrialProcesses, rehearse
from anytron.run.preflight.trial import Rehearsal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedPrompts

WIDTH = 80
"""Columns of what is printed, where the output is not a terminal."""
FINDING = {"row": 4, "finding": 7, "example": 9, "remedy": 8}
"""Columns of the table of findings, and their shares of its width."""
SHOWN = 32
"""Columns of a response in a table."""


def run_check(path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Check the rewards of a run, print the findings, and return whether there are none.

    Raises:
        ConfigError: The configuration is not valid.
        DataError: Prompts cannot be read, or ``right_answer`` of a reward class fails.
    """
    found: dict[str, Rehearsal] = {}
    for stage, (config, _) in read_stages(path, overrides).items():
        for name, prepared in _subjects(config, f"stage {stage}" if stage else "training"):
            found[name] = _checked(name, config, prepared)
    if as_json:
        typer.echo(json.dumps({name: one.as_json() for name, one in found.items()}, indent=2, default=str))
    else:
        console = result_console(WIDTH)
        for name, one in found.items():
            _show(console, name, one)
    return not any(one.findings for one in found.values())


def _subjects(config: RunConfig, name: str) -> Iterator[tuple[str, PreparedPrompts]]:
    """Yield what is checked: training and each validation set."""
    with within(name):
        if config.supervised:
            examples = prepare_prompts(config, error_console().print)
            yield name, examples
            for held_out in prepare_held_out(config, examples):
                yield f"{name}, {held_out.section.title}", held_out.prepared
            return
        prepared = prepare(config, error_console().print)
        yield name, prepared
        for one in prepare_validation(config, prepared):
            yield f"{name}, {one.section.title}", one.prepared


def _checked(name: str, config: RunConfig, prepared: PreparedPrompts) -> Rehearsal:
    """Try a subject's rewards. Supervised fine-tuning has no rewards: reading its data is the whole check."""
    from rich.progress import Progress

    from anytron.run.preflight.prepare import PreparedRun

    if not isinstance(prepared, PreparedRun):
        return Rehearsal(notes=prepared.sampler.remarks)
    console = error_console()
    with (
        tempfile.TemporaryDirectory(prefix="anytron-") as logs,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        TrialProcesses(Path(logs), config.executor.start_timeout_s) as processes,
    ):
        tasks = {reward: bar.add_task(f"{name}: {reward}", total=None) for reward in prepared.rewards.sections}

        def tell(reward: str, done: int, total: int) -> None:
            bar.update(tasks[reward], completed=done, total=total)

        has_environment = config.environment is not None
        found = rehearse({name: prepared}, processes, has_environment=has_environment, tell=tell)[name].found
    found.notes += prepared.sampler.remarks
    return found


def _show(console: Console, name: str, found: Rehearsal) -> None:
    """Print what was tried, the findings, and the score of each form of response."""
    count = len(found.findings)
    console.print(f"{name}: {count} finding{'s' * (count != 1)}" if count else f"{name}: nothing wrong")
    for reward, tried in found.tried.items():
        console.print(_text(f"  tried   {reward} on {tried} prompt{'s' * (tried != 1)}"))
    for reward, why in found.left_out.items():
        console.print(_text(f"  left out   {reward}: {why}"))
    for note in found.notes:
        console.print(_text(f"  note   {note}"))
    for table in ([_findings(found)] if found.findings else []) + [_scores(found, reward) for reward in found.scores]:
        console.print()
        console.print(table)


def _findings(found: Rehearsal) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 1, 0), expand=True, title_justify="left")
    table.title, table.title_style = "findings", "bold"
    for heading in ("row", "finding", "example", "remedy"):
        table.add_column(heading, ratio=FINDING[heading], overflow="fold")
    for one in found.findings:
        what, fix = f"{one.what} {one.count} prompt{'s' * (one.count != 1)}", one.fix
        for row, seen in one.rows:
            table.add_row(*map(_text, (row, what, seen, fix)))
            what, fix = "", ""
    return table


def _scores(found: Rehearsal, reward: str) -> Table:
    """The matrix of a reward: what each form scored."""
    from rich.table import Table

    example = one_line(found.example[reward])
    title = f"what {reward} gives: the score for {example}, and the mean of {found.tried[reward]}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("form", no_wrap=True)
    table.add_column("right", no_wrap=True)
    table.add_column("response", no_wrap=True, max_width=SHOWN, overflow="ellipsis")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    for form, one in found.scores[reward].items():
        right, written = "yes" if one.right else "no", one.written[: 2 * SHOWN]
        table.add_row(form, right, _text(written), _number(one.first), _number(one.mean))
    return table


def _number(score: float | None) -> str:
    return "fails" if score is None else f"{score:.3g}"


def _text(text: str) -> Text:
    from rich.text import Text

    return Text(one_line(text))
