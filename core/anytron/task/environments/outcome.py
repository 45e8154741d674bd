"""What became of a response that had an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.task.isolation.failure import Failure


@dataclass(frozen=True)
class Outcome:
    """What an environment made of a response.

    Attributes:
        turns: What the model wrote in each turn, decoded without special tokens; at least one.
        reward: The environment's rewards, added up.
        metrics: Its numbers, each added up.
        failure: Why the environment could not be used to the end, and the sample is dropped; None if it could.
    """

    turns: tuple[str, ...]
    reward: float
    metrics: Mapping[str, float]
    failure: Failure | None = None
