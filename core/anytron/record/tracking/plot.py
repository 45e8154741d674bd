"""Draw a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.record.tracking.sinks import read_jsonl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

INK, ACCENT, GRID = "#1f2933", "#0b6e99", "#d9dee4"


def plot_reward(metrics: Path, image: Path) -> None:
    """Draw mean reward over steps: smoothed line, each step's mean, band of one standard deviation.

    Args:
        metrics: A ``metrics.jsonl`` with ``step``, ``reward/mean``, ``reward/std``.
        image: The PNG to write; its directory is made.
    """
    records = read_jsonl(metrics)
    spread = smoothed([record["reward/std"] for record in records])
    _plot(records, "reward/mean", "Reward", image, spread)


def plot_loss(metrics: Path, image: Path) -> None:
    """Draw the loss of supervised fine-tuning over steps: smoothed line, and each step's.

    Args:
        metrics: A ``metrics.jsonl`` with ``step`` and ``loss/nll``.
        image: The PNG to write; its directory is made.
    """
    _plot(read_jsonl(metrics), "loss/nll", "Loss (nats per token)", image)


def _plot(
    records: Sequence[Mapping[str, float]], metric: str, title: str, image: Path, spread: Sequence[float] = ()
) -> None:
    # The object interface, not pyplot: no global state, and no display is looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record["step"] for record in records]
    mean = [record[metric] for record in records]
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
    """Average exponentially, corrected for the start (as Adam's moments are, arXiv:1412.6980, section 3)."""
    result, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1.0 - weight) * value
        result.append(average / (1.0 - weight**count))
    return result
