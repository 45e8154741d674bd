"""``anytron data check``: try a run's rewards on its data."""

from __future__ import annotations

import json
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anytron.cli.output import error_console
from anytron.config.load import read_stages
from anytron.errors import within
from anytron.preflight.prepare import prepare, prepare_prompts
from anytron.preflight.rehearsal import Rehearsal, rehearse
from anytron.preflight.validation import prepare_held_out, prepare_validation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.config.schema import RunConfig
    from anytron.preflight.prepare import PreparedRun

WIDTH = 80
"""Columns of what is printed."""


def run_check(path: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Check, print, and say whether nothing was found.

    Raises:
        ConfigError: The configuration is not valid.
        DataError: Prompts cannot be read, or rewards refuse them.
    """
    found: dict[str, Rehearsal] = {}
    for stage, (config, _) in read_stages(path, overrides).items():
        for name, prepared in _subjects(config, f"stage {stage}" if stage else "training"):
            found[name] = Rehearsal() if prepared is None else _checked(name, config, prepared)
    if as_json:
        typer.echo(json.dumps({name: one.as_json() for name, one in found.items()}, indent=2, default=str))
    else:
        for name, one in found.items():
            for line in lines(name, one):
                typer.echo(line)
    return not any(one.findings for one in found.values())


def _subjects(config: RunConfig, name: str) -> Iterator[tuple[str, PreparedRun | None]]:
    """Give what is checked: training and each validation set; of supervised fine-tuning the data are read, no more."""
    with within(name):
        if config.supervised:
            prepare_held_out(config, prepare_prompts(config))
            yield name, None
            return
        prepared = prepare(config)
        yield name, prepared
        for one in prepare_validation(config, prepared):
            yield f"{name}, {one.section.title}", one.prepared


def _checked(name: str, config: RunConfig, prepared: PreparedRun) -> Rehearsal:
    from rich.progress import Progress

    console = error_console()
    with (
        tempfile.TemporaryDirectory(prefix="anytron-") as logs,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        prepared.rewards.start(Path(logs), config.executor.start_timeout_s) as workers,
    ):
        tasks = {reward: bar.add_task(f"{name}: {reward}", total=None) for reward in prepared.rewards.sections}

        def tell(reward: str, done: int, total: int) -> None:
            bar.update(tasks[reward], completed=done, total=total)

        return rehearse(prepared, workers, has_environment=config.environment is not None, tell=tell)


def lines(name: str, found: Rehearsal) -> Iterator[str]:
    """Write what was found, in lines of at most ``WIDTH`` columns."""
    yield f"{name}: " + ("nothing wrong" if not found.findings else f"{len(found.findings)} findings")
    for reward, count in found.tried.items():
        yield from _wrapped(f"tried   {reward} on {count} prompts", 2)
    for reward, why in found.left_out.items():
        yield from _wrapped(f"left out   {reward}: {why}", 2)
    for note in found.notes:
        yield from _wrapped(f"note   {note}", 2)
    for one in found.findings:
        yield ""
        yield from _wrapped(f"{one.what} {one.count} prompt{'s' * (one.count != 1)}, for example:", 2)
        for row, seen in one.rows:
            yield from _wrapped(f"{row}: {seen}", 4)
        yield from _wrapped(f"fix: {one.fix}", 4)


def _wrapped(text: str, indent: int) -> list[str]:
    """Break lines, with what is no letter or sign escaped: nothing commands the terminal."""
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return textwrap.wrap(shown, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))
