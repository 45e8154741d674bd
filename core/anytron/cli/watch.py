"""``anytron watch``: a run in the terminal, while it goes on."""

from __future__ import annotations

import time
from bisect import bisect_right
from typing import TYPE_CHECKING

from rich.live import Live

from anytron.cli.output import result_console
from anytron.cli.picture import picture
from anytron.cli.progress import facts
from anytron.record.report.run import Run, State, runs_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import Console

BEFORE = 10
"""Steps that are said at first where it is one line per step."""
PATIENCE_S = 60.0
"""Seconds that the directory may be nobody's while the run's process still lives: after a loss it starts again."""


def run_watch(path: Path, interval: float, *, once: bool) -> None:
    """Show a run until it is over.

    Args:
        path: The run's directory; of one with stages, the last of them that has begun.
        interval: Seconds between two looks at it.
        once: Show one picture and end.

    Raises:
        ConfigError: It is no run's directory.
    """
    run = Run(runs_in(path)[-1])
    console = result_console()
    if once:
        console.print(picture(run, console.width, console.encoding))
    elif console.is_terminal and not console.is_dumb_terminal:
        _live(run, interval, console)
    else:
        _lines(run, interval)


def _live(run: Run, interval: float, console: Console) -> None:
    """Draw the picture again and again, in place; the last one stays."""
    with Live(console=console, auto_refresh=False) as live:
        for over in _looks(run, interval):
            live.vertical_overflow = "visible" if over else "crop"
            live.update(picture(run, console.width, console.encoding), refresh=True)


def _lines(run: Run, interval: float) -> None:
    """Print a line for each step and each warning as they come."""
    total = "" if run.total_steps is None else f"/{run.total_steps}"
    told, logged = run.history.steps[-BEFORE - 1] if len(run.history.steps) > BEFORE else 0, len(run.log())
    for _ in _looks(run, interval):
        if run.history.last < told:
            _say(f"the run goes on after step {run.history.last}")
            told = run.history.last
        for step in run.history.steps[bisect_right(run.history.steps, told) :]:
            told = step
            _say(f"step {step}{total}  {facts(run.history.at(step))}")
        lines = run.log()
        for line in lines[logged:]:
            _say(line)
        logged = len(lines)
    _say(f"{run.path}: {run.state.value}")
    if run.early_stop is not None:
        _say(run.early_stop)
    if run.failure is not None:
        _say(f"error: {run.failure}")


def _say(text: str) -> None:
    print(text, flush=True)


def _looks(run: Run, interval: float) -> Iterator[bool]:
    """Yield after each look at a run whether it was the last one."""
    over, since = False, None
    while not over:
        if run.state in (State.GOING, State.UNKNOWN):
            since = None
        elif since is None:
            since = time.monotonic()
        over = run.is_over or (since is not None and time.monotonic() > since + PATIENCE_S)
        yield over
        if not over:
            time.sleep(interval)
            run.update()
