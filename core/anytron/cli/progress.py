"""How a run is shown: a bar on a terminal, one line per step elsewhere, or its warnings alone."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from anytron.cli.output import kernels_line
from anytron.record.tracking.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from typing_extensions import Self


class WarningsOnly(Progress):
    """Shows warnings only, for users who want to see no progress."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def warn(self, text: str) -> None:
        """Print the warning as a line."""
        self._console.print(f"warning: {text}")


class PlainProgress(WarningsOnly):
    """One line per step, for logs."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._total = 0

    def start(self, total_steps: int, devices: Sequence[str], kernels: Mapping[str, str], done: int = 0) -> None:
        """Print the devices and the plugins that supplied the kernels, and remember the number of steps."""
        self._total = total_steps
        self._console.print(_started(devices, kernels, done))

    def step(self, metrics: Mapping[str, float]) -> None:
        """Print the number of the step and its most important metrics as a line."""
        self._console.print(f"step {metrics['step']:.0f}/{self._total}  {facts(metrics)}")

    def note(self, text: str) -> None:
        """Print a note."""
        self._console.print(text)


class BarProgress(Progress):
    """A bar with reward and throughput, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._bar = Bar(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TextColumn("{task.fields[part]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("train", total=None, facts="starting the workers", part="")
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def start(self, total_steps: int, devices: Sequence[str], kernels: Mapping[str, str], done: int = 0) -> None:
        """Show the empty bar, and above it the devices and the plugins that supplied the kernels."""
        self._bar.console.print(_started(devices, kernels, done))
        self._bar.update(
            self._task, total=total_steps, completed=done, facts=f"started in {time.monotonic() - self._began:.0f} s"
        )

    def part(self, name: str) -> None:
        """Show the part of the step that begins now, with the time of its beginning."""
        self._bar.update(self._task, part=f"{name} since {time.strftime('%H:%M:%S')}")

    def step(self, metrics: Mapping[str, float]) -> None:
        """Advance the bar."""
        self._bar.update(self._task, completed=metrics["step"], facts=facts(metrics))

    def note(self, text: str) -> None:
        """Print a note above the bar."""
        self._bar.console.print(text)

    def warn(self, text: str) -> None:
        """Print a warning above the bar, where it stays visible."""
        self._bar.console.print(Text.assemble(("warning:", "bold yellow"), " ", text))

    def finish(self) -> None:
        """Stop redrawing the bar and restore the terminal."""
        self._bar.stop()


def _started(devices: Sequence[str], kernels: Mapping[str, str], done: int) -> str:
    """``started on 2 x Ascend910B2`` and a line about the kernels."""
    after = f" after step {done}" if done else ""
    counted = ", ".join(f"{count} x {name}" for name, count in Counter(devices).items())
    return f"started on {counted}{after}\n{kernels_line(kernels)}"


def make_progress(console: Console, *, shown: bool) -> Progress:
    """Choose how to show a run: if ``shown`` is False (``tracking.progress``), only its warnings are shown."""
    if not shown:
        return WarningsOnly(console)
    return BarProgress(console) if console.is_terminal else PlainProgress(console)


def facts(metrics: Mapping[str, float]) -> str:
    """Return a line with the known facts of a step: ``reward 0.512  12,346 tokens/s  0.12 s/step``."""
    known = (
        ("reward/mean", "reward {:.3f}"),
        ("loss/nll", "loss {:.3f}"),
        ("throughput/tokens_per_s", "{:,.0f} tokens/s"),
        ("time/step_s", "{:.2f} s/step"),
    )
    return "  ".join(text.format(metrics[name]) for name, text in known if name in metrics)
