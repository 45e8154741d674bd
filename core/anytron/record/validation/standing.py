"""Which of several validations was the best, and how many have come since."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Direction = Literal["max", "min"]


@dataclass(frozen=True)
class Standing:
    """Where a metric stands after some validations.

    Attributes:
        best_step: The step with its best value; None as long as it never was a number.
        best: That value.
        waited: Validations since then.
    """

    best_step: int | None = None
    best: float | None = None
    waited: int = 0


def is_better(value: float, best: float | None, direction: Direction, min_delta: float = 0.0) -> bool:
    """Whether a value beats the best one so far by more than ``min_delta``; NaN never does."""
    if best is None:
        return not math.isnan(value)
    return value > best + min_delta if direction == "max" else value < best - min_delta


def standing(found: Iterable[tuple[int, float]], direction: Direction, min_delta: float) -> Standing:
    """Go through the values of a metric, step by step.

    As with other trainers' early stopping, a value that is better by ``min_delta`` or less changes nothing, so that
    several of them together still count once they are better by more.
    """
    now = Standing()
    for step, value in found:
        better = is_better(value, now.best, direction, min_delta)
        now = Standing(step, value) if better else Standing(now.best_step, now.best, now.waited + 1)
    return now
