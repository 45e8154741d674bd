"""Write ``docs/reference/metrics.md`` from the table of metrics, and from those of engines.

Run ``python -m anytron.record.tracking.document docs/reference/metrics.md`` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.components import TRAINING_ENGINES, component_names, engine_info
from anytron.record.tracking.metric_table import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anytron.base.metric import Metric

HEADING = """# Metrics

<!-- Generated from core/anytron/record/tracking/metric_table.py and the descriptions of engines by
`python -m anytron.record.tracking.document docs/reference/metrics.md`. -->

Each step of a run is one line of `metrics.jsonl` in `trainer.output_dir`: a JSON object of these keys. Numbers of
updates are averages over the step's updates that were not skipped. A loss of your own (`algorithm.loss`) returns its
own metrics, below `loss/metrics/`, instead of the metrics of the built-in loss. `NAME` stands for a name, other
capitals for a number.

Each validation is one line of `validation.jsonl`: `step`, the training steps behind it, and the keys below
`validation/`.
"""
DISTRIBUTION = "anytron"
"""The reference has the metrics of this distribution's engines, whatever else is installed."""

_UPDATES = "step and update"


def render() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEADING, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    sections: dict[str, list[Metric]] = {}
    for metric in METRICS:
        head, _, rest = metric.name.partition("/")
        sections.setdefault(head if rest and head != "update" else _UPDATES, []).append(metric)
    for head, metrics in sections.items():
        yield from _table(head, metrics)
    for engine in component_names(TRAINING_ENGINES, DISTRIBUTION):
        metrics = list(engine_info(TRAINING_ENGINES, engine, "engine.name").metrics)
        if metrics:
            yield from _table(f"Of the engine {engine}", metrics)


def _table(title: str, metrics: Iterable[Metric]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| metric | unit | meaning | only if |"
    yield "|---|---|---|---|"
    for metric in metrics:
        yield f"| `{metric.name}` | {metric.unit} | {metric.meaning} | {metric.when} |"
    yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
