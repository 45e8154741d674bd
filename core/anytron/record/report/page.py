"""Make one HTML file from the files of runs. It loads nothing else, and shows all content of the runs as plain text."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, DataError
from anytron.record.report.chapters import chapters, descriptions, is_end, leading
from anytron.record.report.history import mean, smooth
from anytron.record.report.run import REST
from anytron.record.report.samples import choose_samples
from anytron.record.report.settings import compared, describe_workers, devices, settings, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from anytron.record.report.history import Series
    from anytron.record.report.run import Run


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name each path by its last parts, as many as are needed to tell the paths apart."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [str(path) for path in paths]


LONGEST_SIDE = 224
"""Largest width and height of an embedded picture, in pixels."""


def embed_pictures(directory: Path, names: Iterable[str], room: int) -> dict[str, str]:
    """Return pictures as ``data:`` URLs by name, the first ones that fit; unreadable pictures are left out.

    Args:
        directory: Directory of the run.
        names: Paths of the pictures, relative to the directory.
        room: Largest number of characters of all URLs together.
    """
    from anytron.task.data.vision import read_picture  # Pillow

    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if (directory / name).is_symlink():
            continue
        try:
            small = read_picture(directory / name, name)
        except DataError:
            continue
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=80)
        address = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        room -= len(address)
        if room < 0:
            break
        found[name] = address
    return found


LARGEST = 3_000_000
"""Largest size of a report, in bytes."""
SERIES, SAMPLES, PICTURES = 1_200_000, 1_000_000, 400_000
"""Largest size of the plots, the samples and the pictures of all runs together, in bytes."""
LINES = 200
"""Largest number of log lines of each run, and of records of processes that died."""
SHARES = (1.0, 0.5, 0.2, 0.05)
"""Factors of the limits above, which are tried in turn until the report is small enough."""
POINT = 15
"""Estimated size of a point (step and value), in bytes."""
FEWEST, MOST = 40, 1500
"""Smallest and largest number of points of a plotted line."""
NEAR = 10
"""Number of first, and of last, steps whose mean is shown as the value at first, and at last."""
MARK = "<!doctype html><!-- a report of anytron -->"
"""How every report begins."""
_SCRIPTS = ("elements.js", "chart.js", "plots.js", "samples.js", "tables.js", "main.js")


def render(runs: Sequence[Run], largest: int = LARGEST) -> str:
    """Return the HTML page about runs.

    Args:
        runs: The runs to show, at least one.
        largest: Largest size of the page in bytes.

    Returns:
        The page in ASCII; other characters are escaped.

    Raises:
        ConfigError: The runs do not fit into ``largest`` bytes.
    """
    for share in SHARES:
        page = _page(_content(runs, share))
        if len(page) <= largest:
            return page
    raise ConfigError(
        "The report is too large.",
        where=", ".join(str(run.path) for run in runs),
        why=f"even with the fewest points and samples it has {len(page):,} bytes; {largest:,} are allowed",
        fix="report fewer runs at once",
    )


def _page(content: Mapping[str, Any]) -> str:
    assets = files("anytron.record.report") / "assets"
    style = (assets / "style.css").read_text(encoding="ascii")
    script = "\n".join((assets / name).read_text(encoding="ascii") for name in _SCRIPTS)
    # Inside of a script element only "<" could end it.
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(content["title"]).encode("ascii", "xmlcharrefreplace").decode(),
        "STYLE-HASH": _hash(style),
        "SCRIPT-HASH": _hash(script),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
    }
    page = (assets / "page.html").read_text(encoding="ascii")
    return MARK + "".join(parts.get(piece, piece) for piece in page.split("@@"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _content(runs: Sequence[Run], share: float) -> dict[str, Any]:
    names = short_names([run.path for run in runs])
    metrics = sorted({name for run in runs for name in run.series if not is_end(name)})
    lines = sum(len(run.series) for run in runs)
    points = min(max(int(SERIES * share / POINT / max(lines, 1)), FEWEST), MOST)
    configs = [{} if run.record is None else run.record.config for run in runs]
    return {
        "title": f"{', '.join(names)} - Anytron",
        "made": time.strftime("%Y-%m-%d %H:%M %z"),
        "runs": [{"name": name, **_run(run, points, share, len(runs))} for name, run in zip(names, runs, strict=True)],
        "chapters": chapters(metrics),
        "leading": leading(metrics),
        "metrics": descriptions(metrics, [str(run.setting("engine", "name")) for run in runs]),
        "settings": [[key, values] for key, values in compared(configs)],
    }


def _run(run: Run, points: int, share: float, runs: int) -> dict[str, Any]:
    workers = run.workers()
    chosen = choose_samples(run, int(SAMPLES * share / runs))
    shown = [name for sample in chosen["samples"] for name in sample.get("images", ())]
    record = run.record
    return {
        "path": str(run.path),
        "state": run.state.value,
        "going": run.owner is not None,
        "failure": run.failure,
        "facts": _facts(run, devices(workers)),
        "series": {name: _line(series.thinned(points)) for name, series in run.series.items()},
        "section": max((series.section(points) for series in run.series.values()), default=1),
        "parts": run.seconds_by_part(),
        "steps": len(run.history.series[REST].steps) if REST in run.history.series else 0,
        **chosen,
        "pictures": embed_pictures(run.path, shown, int(PICTURES * share / runs)),
        "resumes": [
            {"step": one.step, "changes": [_changed(one.key, one.old, one.new) for one in one.changes]}
            for one in ([] if record is None else record.resumes)
        ],
        "losses": [{key: shortened(str(value)) for key, value in loss.items()} for loss in run.losses()[-LINES:]],
        "log": [shortened(line) for line in run.log(max(int(LINES * share), 1))],
        "versions": {} if record is None else record.versions,
        "workers": describe_workers(workers),
        "problems": [shortened(problem) for problem in run.problems],
    }


def _changed(key: str, old: Any, new: Any) -> list[str]:
    """A change of the configuration as texts: key, before, after."""
    before, after = (" ".join(settings({key: value}).values()) for value in (old, new))
    return [key, before, after]


def _line(series: Series) -> list[list[Any]]:
    return [list(series.steps), [_short(value) for value in series.values]]


def _short(value: float) -> float | int | str:
    """Round a number to six digits; NaN and infinity, which JSON does not have, become strings."""
    if not math.isfinite(value):
        return str(value)
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _facts(run: Run, device: str) -> list[list[str]]:
    """The facts that are shown first about a run, as pairs of label and text."""
    history, facts = run.history, []
    total = "" if run.total_steps is None else f" of {run.total_steps:,}"
    facts.append(["step", f"{history.last:,}{total}"])
    rewards = history.values("reward/mean")
    if rewards:
        facts.append(["reward at first", f"{mean(rewards[:NEAR]):.4g}"])
        facts.append(["reward at last", f"{mean(rewards[-NEAR:]):.4g}"])
        facts.append(["best reward", f"{max(smooth(rewards, NEAR)[min(NEAR, len(rewards)) - 1 :]):.4g}"])
    if losses := history.values("loss/nll"):
        facts.append(["loss at first", f"{mean(losses[:NEAR]):.4g}"])
        facts.append(["loss at last", f"{mean(losses[-NEAR:]):.4g}"])
    seconds = history.values(REST)
    if seconds:
        facts.append(["time of all steps", duration(math.fsum(seconds))])
        facts.append(["time of a step", f"{mean(seconds):.3g} s"])
    if tokens := history.values("throughput/tokens_per_s"):
        facts.append(["tokens/s", f"{mean(tokens):,.0f}"])
    if run.owner is not None and (left := run.remaining_seconds) is not None:
        facts.append(["time left", duration(left)])
    if run.early_stop is not None:
        facts.append(["ended by", run.early_stop])
    if device:
        facts.append(["trained on", device])
    model = run.setting("model", "path") or run.setting("model", "config", "model_type")
    supervised = run.setting("algorithm", "name") == "sft"
    taught = ("algorithm", "sft") if supervised else ("advantage", run.setting("algorithm", "advantage"))
    for key, value in (("model", model), taught):
        if isinstance(value, str):
            facts.append([key, shortened(value, 200)])
    if traces := run.traces():
        facts.append(["traces of the profiler", shortened(", ".join(traces), 200)])
    if run.record is not None and run.record.started_from:
        facts.append(["started from", run.record.started_from])
    return facts


def duration(seconds: float) -> str:
    """Format a duration in at most two units: ``3 h 12 min``."""
    whole = round(seconds)
    for unit, name, below, lower in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {lower}"
    return f"{whole} s"
