"""What a number in ``metrics.jsonl`` means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Metric:
    """One number of a training step.

    Attributes:
        name: The key in ``metrics.jsonl``. Between slashes, a word in capitals (``NAME``) stands for any name; capitals
            within a word (``mean@N``) stand for a number.
        unit: What it counts or measures; empty = a plain number.
        meaning: Meaning of the number, in a phrase.
        when: Which runs have it; empty = all.
    """

    name: str
    unit: str
    meaning: str
    when: str = ""

    def matches(self, key: str) -> bool:
        """Whether a key of ``metrics.jsonl`` is this metric."""
        parts = (".+" if part.isupper() else _with_a_number(part) for part in self.name.split("/"))
        return re.fullmatch("/".join(parts), key) is not None


def _with_a_number(part: str) -> str:
    return "[0-9]+".join(re.escape(piece) for piece in re.split("[A-Z]+", part))


def is_maximum(name: str) -> bool:
    """Whether a metric of an update is combined by the maximum (its name ends in ``_max``); all others are summed."""
    return name.endswith("_max")


def joined(name: str, parts: Iterable[float]) -> float:
    """Combine a metric's values of several micro-batches or replicas into its value of the mini-batch."""
    return max(parts) if is_maximum(name) else sum(parts)


def largest(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """Return the largest value by the metric's name; an empty dictionary if any value is unknown (None)."""
    known = [value for value in values if value is not None]
    return {name: max(known)} if len(known) == len(values) else {}
