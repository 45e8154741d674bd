"""``anytron watch``: show a run in the terminal while it goes on."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Literal

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from anytron.base.terminal import visible
from anytron.cli.output import result_console
from anytron.cli.progress import facts
from anytron.record.report.chapters import LEADING, validation_means
from anytron.record.report.page import duration
from anytron.record.report.run import Run, State, runs_in
from anytron.record.report.samples import last_samples
from anytron.record.report.settings import devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console, RenderableType


BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Heights of an eighth to a whole line."""
PLAIN = " .:-=+*#@"
"""Characters in the place of :data:`BLOCKS` for terminals that know ASCII only."""


def plot(values: Sequence[float], width: int, lines: int = 1, levels: str = BLOCKS) -> list[str]:
    """Draw columns, the first value on the left.

    Args:
        values: The values. Non-finite ones leave a gap, or ``!`` in the lowest line of a column without finite ones.
        width: Width in characters; with more values, each column shows the mean of several.
        lines: Height in lines of text.
        levels: Nine characters, from empty to full.

    Returns:
        The lines, the highest first, each as wide as there are columns.
    """
    columns = _columns(values, width)
    finite = [value for value in columns if value is not None]
    if not finite:
        return [" " * len(columns)] * (lines - 1) + ["!" * len(columns)]
    low, high = min(finite), max(finite)
    full = len(levels) - 1
    drawn = []
    for line in reversed(range(lines)):
        text = ""
        for value in columns:
            if value is None:
                text += " " if line else "!"
                continue
            part = (value - low) / (high - low) if high > low else 0.5
            height = 1 + round(part * (lines * full - 1))  # the lowest is seen as well
            text += levels[min(max(height - line * full, 0), full)]
        drawn.append(text)
    return drawn


def _columns(values: Sequence[float], width: int) -> list[float | None]:
    count = min(len(values), width)
    found: list[float | None] = []
    for column in range(count):
        part = values[column * len(values) // count : (column + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        found.append(math.fsum(finite) / len(finite) if finite else None)
    return found


PLOTTED = ("reward/mean", "loss/nll")
"""The first of these metrics that a run has gets a plot of several lines."""
METRICS = (*(name for name in LEADING if name not in PLOTTED), "throughput/tokens_per_s")
COLOURS = {State.GOING: "cyan", State.FINISHED: "green", State.FAILED: "bold red"}
PARTS = ("blue", "yellow", "green", "magenta", "red", "cyan")
RECENT = 20
"""Last steps over which the view shows where the time goes."""
PLOT_LINES = 6
"""Height, in lines, of the plot of a metric in :data:`PLOTTED`."""
WARNINGS, SAMPLES = 5, 3
"""Most warnings and samples that are shown, the last ones."""
LONGEST = 240
"""Characters of a prompt, a response or a warning that are shown."""
FEWEST, MOST = 20, 160
"""Columns of the narrowest and of the widest plot."""


def picture(run: Run, width: int, encoding: str) -> RenderableType:
    """Draw a run as it is now.

    Args:
        run: The run, after :meth:`~anytron.record.report.run.Run.update`.
        width: Columns of the terminal.
        encoding: Encoding of the terminal: characters that it lacks are escaped, and plots use ASCII if necessary.
    """
    return Group(*_Picture(run, width, encoding).parts())


class _Picture:
    def __init__(self, run: Run, width: int, encoding: str) -> None:
        self._run, self._width, self._encoding = run, width, encoding
        self._levels = BLOCKS if encoding.lower().replace("-", "") in ("utf8", "utf16", "utf32") else PLAIN

    def parts(self) -> Iterator[RenderableType]:
        yield self._heading()
        if self._run.history.last:
            yield self._plot()
            yield self._metrics()
            yield self._time()
        else:
            yield Text("no step is recorded yet", "dim")
        yield from self._warnings()
        yield from self._samples()

    def _heading(self) -> Text:
        run = self._run
        total = "" if run.total_steps is None else f"/{run.total_steps}"
        text = Text.assemble(
            (self._visible(str(run.path)), "bold"), "  ", (run.state.value, COLOURS.get(run.state, "yellow"))
        )
        if run.owner is not None:
            text.append(self._visible(f" ({run.owner})"), "dim")
        text.append(f"\nstep {run.history.last}{total}")
        if run.total_steps:
            done = min(run.history.last / run.total_steps, 1.0)
            text.append(f"  {done:.0%}")
        spent = sum(run.history.values("time/step_s"))
        text.append(f"  {duration(spent)} trained")
        if run.state is State.GOING and (left := run.remaining_seconds) is not None:
            text.append(f"  {duration(left)} left", "bold")
        if trained_on := devices(run.workers()):
            text.append(self._visible(f"  on {trained_on}"), "dim")
        if run.early_stop is not None:
            text.append(self._visible(f"\n{run.early_stop}"))
        return text

    def _plot(self) -> RenderableType:
        name = next((one for one in PLOTTED if one in self._run.history.series), None)
        if name is None:
            return Text("")
        series = self._run.history.series[name]
        lines = plot(series.values, self._plot_width(), PLOT_LINES, self._levels)
        values = self._run.history.values(name)
        grid = Table.grid(padding=(0, 1))
        labels = [f"{max(values):.4g}", *[""] * (PLOT_LINES - 2), f"{min(values):.4g}"] if values else [""] * PLOT_LINES
        for label, line in zip(labels, lines, strict=True):
            grid.add_row(Text(label, "dim", justify="right"), Text(line, "green", no_wrap=True))
        return Group(Text(f"\n{name} {self._last(name)}", "bold"), grid, Text(""))

    def _metrics(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for name in ("metric", "so far", "last", "lowest", "highest"):
            justify: Literal["left", "right"] = "left" if name in ("metric", "so far") else "right"
            table.add_column(name, justify=justify, no_wrap=True, overflow="crop")
        for name in (*validation_means(self._run.validation.series), *METRICS):
            series = self._run.series.get(name)
            if series is None:
                continue
            (line,) = plot(series.values, max(self._plot_width() - 30, FEWEST), 1, self._levels)
            values = [value for value in series.values if math.isfinite(value)]
            low, high = (f"{min(values):.4g}", f"{max(values):.4g}") if values else ("", "")
            table.add_row(name, Text(line, "cyan"), self._last(name), low, high)
        return table

    def _time(self) -> RenderableType:
        parts = {name: spent for name, spent in self._run.seconds_by_part(RECENT).items() if spent > 0}
        whole = sum(parts.values())
        if not whole:
            return Text("")
        shares = sorted(parts.items(), key=lambda part: -part[1])
        bar, legend = Text("\n"), Text()
        for number, (name, spent) in enumerate(shares):
            colour, shown = PARTS[number % len(PARTS)], self._visible(name)
            drawn = "\u2588" if self._levels is BLOCKS else shown[:1].upper() or "#"
            bar.append(drawn * round(spent / whole * self._plot_width()), colour)
            legend.append(f"{shown} {spent / whole:.0%}  ", colour)
        return Group(bar, legend)

    def _warnings(self) -> Iterator[RenderableType]:
        run = self._run
        lost = run.losses()
        said = [
            f"lost after step {one.get('after_step')}: {one.get('lost')} {one.get('then')}" for one in lost[-WARNINGS:]
        ]
        said += [*run.log(WARNINGS), *run.problems]
        if run.failure is not None:
            said.append(f"error: {run.failure}")
        if said:
            yield Text("\nwarnings", "bold")
            yield from (Text(self._short(text), "yellow") for text in said)

    def _samples(self) -> Iterator[RenderableType]:
        samples = last_samples(self._run, SAMPLES)
        if samples:
            yield Text("\nlast samples", "bold")
        for sample in samples:
            reward = "none" if sample["reward"] is None else f"{sample['reward']:.4g}"
            of = f"validation {sample['validation']} after " if "validation" in sample else ""
            begin = self._visible(f"{of}step {sample['step']}, reward {reward}: ")
            yield Text.assemble((begin, "dim"), self._short(sample["prompt"]))
            for text in sample.get("errors", {}).values():
                yield Text(f"  {self._short(text)}", "red")
            yield Text(f"  {self._short(sample['response']) or '(empty)'}", "cyan")

    def _last(self, name: str) -> str:
        value = {**self._run.validation.recent, **self._run.history.recent}.get(name)
        return "" if value is None else f"{value:.4g}"

    def _plot_width(self) -> int:
        return max(min(self._width - 12, MOST), FEWEST)

    def _short(self, text: str) -> str:
        line = text if len(text) <= LONGEST else f"{text[: LONGEST * 2 // 3]} ... {text[-LONGEST // 3 :]}"
        return self._visible(line.replace("\n", " "))

    def _visible(self, text: str) -> str:
        return visible(text, self._encoding)


BEFORE = 10
"""Past steps that are printed at the start where the output is one line per step."""
PATIENCE_S = 60.0
"""Seconds after which a run counts as over if no process holds its directory: a restart after a loss takes less."""


def run_watch(path: Path, interval: float, *, once: bool) -> None:
    """Show a run until it is over.

    Args:
        path: The run's directory; of a run with stages, the last stage that has begun is shown.
        interval: Seconds between two reads of the directory.
        once: Show the run once and return.

    Raises:
        ConfigError: ``path`` is not a run's directory.
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
