"""A response as it is trained on: what the model wrote, and what an environment wrote in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.task.environments.outcome import Outcome
    from anytron.workers.engines.rollout_engine import Response


@dataclass(frozen=True)
class Trajectory:
    """One response, of one turn or several.

    Attributes:
        tokens: All that follows the prompt, as the model has seen it; may be empty.
        log_probs: Of each token, as the rollout engine saw it; 0 for those that the environment wrote.
        response_mask: For each token, whether the model wrote it; None = it wrote all of them.
        finished: An end token, a stop string or the environment ended it, and no limit did.
        outcome: What the environment made of it; None without one.
        routing: As in :class:`anytron.workers.engines.rollout_engine.Response`, up to the last turn: there is none of
            what an environment wrote before it failed. None if no engine has told any.
        versions: Of the weights that made each token that the model wrote.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finished: bool
    response_mask: tuple[bool, ...] | None = None
    outcome: Outcome | None = None
    routing: Tensor | None = None
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, response: Response) -> Trajectory:
        """Take a response of one turn."""
        finished = response.stop_reason == "stop"
        return cls(response.tokens, response.log_probs, finished, routing=response.routing, versions=response.versions)
