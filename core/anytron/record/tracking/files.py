"""Files that a run writes as it goes on: records as JSON lines, plots, and small copies of samples' pictures."""

from __future__ import annotations

import json
import os
from array import array
from typing import TYPE_CHECKING, Any

from anytron.base.files import why_lost
from anytron.record.tracking.lines import cut_back, read_jsonl
from anytron.task.data.vision import read_picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from anytron.task.data.vision import Picture


class JsonlSink:
    """Writes records to a file, one JSON object per line; each line is flushed when it is written.

    Args:
        path: The file; without ``after``, it must not exist.
        after: Continue an existing file after the records of this step; later records, and a line that a crash cut
            short, are removed first. None = write a new file.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        if after is not None:
            cut_back(path, after)
        # Text from prompts can hold halves of surrogate pairs, which UTF-8 cannot: they are escaped, as JSON allows.
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if after is None else 0)
        self._file = os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8", errors="backslashreplace")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record and flush it. NaN and infinity are written as Python's ``json`` does."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def lost(self) -> str:
        """Return why records no longer reach the file at :attr:`path`; empty as long as they do."""
        return why_lost(self.path, self._file.fileno())

    def take(self, other: JsonlSink) -> None:
        """Append all records of another sink, even if its file was deleted: an open file can still be read."""
        offset = 0
        while block := os.pread(other._file.fileno(), 1 << 20, offset):
            self._file.buffer.write(block)
            offset += len(block)
        self.sync()

    def sync(self) -> None:
        """Wait until all records are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


INK, ACCENT, GRID = "#1f2933", "#0b6e99", "#d9dee4"


def plot_reward(metrics: Path, image: Path) -> None:
    """Draw the mean reward over steps: a smoothed line, each step's mean, and a band of one standard deviation.

    Args:
        metrics: A ``metrics.jsonl`` with ``step``, ``reward/mean``, ``reward/std``.
        image: The PNG to write; its directory is made.
    """
    steps, mean, spread = _columns(metrics, "step", "reward/mean", "reward/std")
    _plot(steps, mean, "Reward", image, smoothed(spread))


def plot_loss(metrics: Path, image: Path) -> None:
    """Draw the loss of supervised fine-tuning over steps: a smoothed line, and each step's loss.

    Args:
        metrics: A ``metrics.jsonl`` with ``step`` and ``loss/nll``.
        image: The PNG to write; its directory is made.
    """
    steps, loss = _columns(metrics, "step", "loss/nll")
    _plot(steps, loss, "Loss (nats per token)", image)


def _columns(metrics: Path, *names: str) -> list[array[float]]:
    columns = [array("d") for _ in names]
    for record in read_jsonl(metrics):
        for name, column in zip(names, columns, strict=True):
            column.append(record[name])
    return columns


def _plot(steps: Sequence[float], mean: Sequence[float], title: str, image: Path, spread: Sequence[float] = ()) -> None:
    # The object interface, not pyplot: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    smooth = smoothed(mean)

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if spread:
        low = [value - width for value, width in zip(smooth, spread, strict=True)]
        high = [value + width for value, width in zip(smooth, spread, strict=True)]
        axes.fill_between(steps, low, high, color=ACCENT, alpha=0.12, linewidth=0, label="one standard deviation")
    axes.plot(steps, mean, color=ACCENT, alpha=0.35, linewidth=0.8, label="mean of each step")
    axes.plot(steps, smooth, color=ACCENT, linewidth=2.2, label="smoothed")
    axes.annotate(
        f"{mean[-1]:.2f}",
        (steps[-1], smooth[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=ACCENT,
        weight="bold",
        annotation_clip=False,
    )
    axes.set_title(title, loc="left", color=INK, weight="bold")
    axes.set_xlabel("training step", color=INK)
    axes.margins(x=0.01)
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.legend(frameon=False, labelcolor=INK, loc="best")
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=160)


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Compute an exponential moving average, bias-corrected like Adam's moments (arXiv:1412.6980, section 3)."""
    result, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1.0 - weight) * value
        result.append(average / (1.0 - weight**count))
    return result


LONGEST_SIDE = 512
"""Largest width and height of a saved picture, in pixels; larger pictures are scaled down."""


class Album:
    """Saves the pictures of a step, or of a validation after it, in ``images/`` of a run's directory.

    A picture that several samples share is saved once.

    Args:
        directory: Directory of the run.
        step: The step, part of the files' names.
        validation: Name of the validation set, also part of the files' names; None = samples of training.
    """

    def __init__(self, directory: Path, step: int, validation: str | None = None) -> None:
        self._directory = directory
        self._begin = f"{step:05d}" if validation is None else f"{step:05d}-{validation}"
        self._names: dict[int, str] = {}

    def add(self, pictures: Sequence[Picture]) -> list[str]:
        """Save pictures, and return their paths relative to the run's directory.

        Raises:
            DataError: A picture can no longer be read.
        """
        return [self._add(picture) for picture in pictures]

    def _add(self, picture: Picture) -> str:
        if id(picture) not in self._names:
            name = f"images/{self._begin}-{len(self._names)}.png"
            (self._directory / "images").mkdir(exist_ok=True)
            small = read_picture(picture, name)
            small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            small.save(self._directory / name)
            self._names[id(picture)] = name
        return self._names[id(picture)]


def remove_pictures(directory: Path, step: int) -> None:
    """Delete the pictures of the steps after ``step``."""
    for file in (directory / "images").glob("*-*.png"):
        number = file.name.partition("-")[0]
        if number.isdigit() and int(number) > step:
            file.unlink()
