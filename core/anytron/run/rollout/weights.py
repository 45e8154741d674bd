"""How the pool has weights given to its engines, and what it is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.base.errors import AnytronError
    from anytron.workers.executor.protocol import WorkerGroup

    GiveWeights = Callable[[Sequence[WorkerGroup]], "Given"]
    """Gives engines all weights of one version, and waits for it. What goes wrong in training ranks is raised."""


@dataclass(frozen=True)
class Given:
    """What became of giving weights to engines.

    Attributes:
        version: Optimizer updates behind the weights.
        answers: By place: the version that the engine says it has, or the error of one that did not get them all. Such
            an engine holds a mixture of two versions: it has ended, and the one that takes its place needs all weights.
    """

    version: int
    answers: Sequence[int | AnytronError]
