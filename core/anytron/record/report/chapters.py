"""Groups of plots in a report, and the descriptions of their metrics."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from anytron.base.components import TRAINING_ENGINES, engine_info
from anytron.base.errors import ConfigError
from anytron.record.tracking.metric_table import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.base.metric import Metric

CHAPTERS = (
    ("Reward", ("reward/mean", "reward/std", "reward/")),
    ("Validation", ("validation/",)),
    ("Dynamic sampling", ("sampling/no_signal_fraction", "sampling/")),
    ("Responses", ("response/length_mean", "response/truncated_fraction", "response/", "environment/")),
    ("Policy", ("loss/nll", "policy/entropy", "policy/kl", "policy/teacher_kl", "policy/", "loss/")),
    ("Rollout against training", ("rollout/log_prob_abs_diff", "rollout/kl", "rollout/")),
    ("Optimizer", ("grad_norm", "lr", "update/")),
    ("Critic", ("critic/",)),
    ("Time", ("time/step_s", "throughput/tokens_per_s", "throughput/mfu", "time/", "throughput/")),
    ("Memory", ("memory/",)),
    ("Other", ("",)),
)
"""Title of each chapter, and the names or prefixes of its metrics in the order in which they are shown."""
LEADING = (
    "reward/mean",
    "loss/nll",
    "response/length_mean",
    "policy/entropy",
    "policy/kl",
    "policy/teacher_kl",
    "rollout/log_prob_abs_diff",
    "grad_norm",
    "lr",
    "time/step_s",
    "memory/training_peak_bytes",
)
"""Metrics that are shown first, in this order, if the run has them."""


def leading(names: Iterable[str]) -> list[str]:
    """Choose the metrics to show first: reward or loss in training, reward or loss of each validation set, others."""
    known = list(names)
    chosen = [name for name in LEADING if name in known]
    return [*chosen[:1], *validation_means(known), *chosen[1:]]


def validation_means(names: Iterable[str]) -> list[str]:
    """Return the metrics that are the mean reward, or the loss, of a validation set."""
    ends = ("mean@", "loss")
    return [name for name in names if name.startswith("validation/") and name.rpartition("/")[2].startswith(ends)]


def is_end(name: str) -> bool:
    """Whether a metric is the lower or upper end of another metric's interval; both are drawn in one plot."""
    return name.startswith("validation/") and name.endswith(("/low", "/high"))


def chapters(names: Iterable[str]) -> list[dict[str, Any]]:
    """Sort metrics into chapters (``title``, ``metrics``): each into the first that lists its name or prefix."""
    left = sorted(set(names))
    found = []
    for title, beginnings in CHAPTERS:
        own = [name for begin in beginnings for name in left if name == begin or (_is_beginning(begin, name))]
        own = list(dict.fromkeys(own))
        left = [name for name in left if name not in set(own)]
        if own:
            found.append({"title": title, "metrics": own})
    return found


def _is_beginning(begin: str, name: str) -> bool:
    return (not begin or begin.endswith("/")) and name.startswith(begin)


def descriptions(names: Iterable[str], engines: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return ``unit`` and ``meaning`` of each known metric, by name.

    Args:
        names: The metrics.
        engines: Names of the training engines that wrote the metrics; the metrics of an engine that is not installed
            are left out.
    """
    known: list[Metric] = list(METRICS)
    for engine in dict.fromkeys(engines):
        with contextlib.suppress(ConfigError, ImportError):
            known += engine_info(TRAINING_ENGINES, engine, "engine.name").metrics
    found = {}
    for name in names:
        metric = next((one for one in known if one.matches(name)), None)
        if metric is not None:
            found[name] = {"unit": metric.unit, "meaning": metric.meaning.partition("; see [")[0].replace("`", "")}
    return found
