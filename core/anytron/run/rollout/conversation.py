"""One response of several turns while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from anytron.base.seeds import derive_seed
from anytron.task.environments import Task, Turn
from anytron.task.environments.outcome import Outcome
from anytron.workers.engines.rollout_engine import PromptInputs, Response

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.environments import Observation
    from anytron.task.isolation.failure import Failure
    from anytron.workers.engines.rollout_engine import SamplingParams, StopReason


@dataclass
class Conversation:
    """What model and environment have said so far. Tokens are only ever added at the end.

    Attributes:
        prompt: Where it begins.
        seed: Everything random in it follows from this.
        max_turns: Turns that the model may have.
        number: Of its environment.
        speaking: The model has been asked for its next turn.
        tokens: What follows the prompt.
        log_probs, response_mask: As in :class:`Response`, for these tokens.
        turns: What the model wrote, decoded.
        versions, routing: As in :class:`Response`.
        reward, metrics: The environment's, added up.
        over: Nothing will be added.
        finished: It came to its end, and to no limit.
        failure: Why the environment could not go on.
    """

    prompt: TokenizedPrompt
    seed: int
    max_turns: int
    number: int = -1
    speaking: bool = False
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    response_mask: tuple[bool, ...] = ()
    turns: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()
    routing: Tensor | None = None
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    over: bool = False
    finished: bool = False
    failure: Failure | None = None

    @property
    def task(self) -> Task:
        """What its environment is set up for."""
        prompt = self.prompt
        seed = derive_seed(self.seed, "environment", 0)
        return Task(prompt.id, prompt.text, dict(prompt.data), seed, self.max_turns)

    def question(self, sampling: SamplingParams, room: int | None) -> tuple[PromptInputs, SamplingParams, int]:
        """Ask for the model's next turn, which sees everything so far.

        Args:
            sampling: How a turn is sampled.
            room: Tokens that the model's context has left; None = unlimited.
        """
        length = sampling.max_new_tokens if room is None else min(sampling.max_new_tokens, room)
        seed = self.seed if not self.turns else derive_seed(self.seed, "turn", len(self.turns))
        shortest = min(sampling.min_new_tokens, length)
        limited = replace(sampling, max_new_tokens=length, min_new_tokens=shortest)
        return PromptInputs(self.prompt.tokens + self.tokens, self.prompt.patches), limited, seed

    def add_turn(self, response: Response, text: str) -> Turn:
        """Add what the model wrote; return what its environment is told."""
        self.speaking = False
        self._add(response.tokens, response.log_probs, own=True)
        self.turns += (text,)
        self.versions += response.versions
        self._add_routing(response.routing)
        return Turn(text, response.tokens, response.stop_reason == "stop")

    def add_observation(self, tokens: tuple[int, ...]) -> None:
        """Add what the environment wrote."""
        self._add(tokens, (0.0,) * len(tokens), own=False)

    def count(self, observation: Observation) -> None:
        """Add up what the environment gives."""
        self.reward += observation.reward
        for name, number in observation.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + number

    def end(self, *, finished: bool, failure: Failure | None = None) -> None:
        """Add nothing more."""
        self.over, self.finished, self.failure = True, finished, failure

    def response(self) -> Response:
        """Return all turns as one response."""
        reason: StopReason = "stop" if self.finished else "length"
        outcome = Outcome(self.turns, self.reward, self.metrics, self.failure)
        return Response(self.tokens, self.log_probs, reason, self.versions, self.routing, self.response_mask, outcome)

    def _add(self, tokens: tuple[int, ...], log_probs: tuple[float, ...], *, own: bool) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.response_mask += (own,) * len(tokens)

    def _add_routing(self, told: Tensor | None) -> None:
        """Keep what a turn tells of tokens that no turn before has told of.

        Those that the model wrote keep the experts with which it wrote them. A later turn, which reads them again, may
        send them to others.
        """
        known = self.routing
        self.routing = told if known is None or told is None else torch.cat([known, told[len(known) :]])
