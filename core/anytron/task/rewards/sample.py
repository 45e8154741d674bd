"""The sample that a reward function receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.task.data.images import ImagePatches
    from anytron.task.data.vision import Picture
    from anytron.task.environments.protocol import Outcome
    from anytron.task.isolation.failure import Failure


@dataclass(frozen=True)
class Sample:
    """One prompt with one response.

    Attributes:
        prompt_id: The prompt's name in its source.
        prompt_text: The prompt's text; decoded if the source gave token ids, or if an agent sent the prompt.
        response_text: The response's text, decoded without special tokens, but with tags of thought (``</think>``); the
            text of an environment is part of it.
        prompt_tokens: Token ids, at least one.
        response_tokens: Token ids, the end token included if there is one; may be empty. They are packed
            (:class:`anytron.base.packed.Packed`): ``list(sample.response_tokens)`` makes a list.
        log_probs: Log-prob of each response token as the rollout engine computed it, in nats; 0 for a token of the
            environment.
        finished: True if an end token, a stop string or the environment ended the response; False if a limit of length
            or of turns did.
        data: The prompt's data from the source, for example the right answer.
        images: The prompt's pictures, as in the source.
        patches: The pictures in the form that the model reads; None without images. Reward functions get None.
        response_mask: For each response token, whether the model wrote it; None = it wrote all of them.
        environment: Outcome of the response in the environment; None without an environment.
        routing: The experts of each token except the last
            (:attr:`anytron.workers.engines.rollout_engine.Response.routing`); reward functions get None.
        opened: The opening tag of thought that the chat template wrote at the end of the prompt, with its white space,
            for example ``<think>`` and a line end. It is empty for most models.
        others: Further conversations that an agent held for this response; reward functions get none. The sample itself
            is the conversation with the model's last answer. Tokens that two conversations share are marked in the
            ``response_mask`` of one of them only.
    """

    prompt_id: str
    prompt_text: str
    response_text: str
    prompt_tokens: Sequence[int]
    response_tokens: Sequence[int]
    log_probs: Sequence[float]
    finished: bool
    data: Mapping[str, Any]
    images: tuple[Picture, ...] = ()
    patches: ImagePatches | None = None
    response_mask: Sequence[bool] | None = None
    environment: Outcome | None = None
    routing: Tensor | None = None
    opened: str = ""
    others: tuple[Sample, ...] = ()

    @property
    def conversations(self) -> tuple[Sample, ...]:
        """The sample, and the further conversations of its agent."""
        return (self, *self.others)

    @property
    def turns(self) -> tuple[str, ...]:
        """The model's own text, turn by turn, without special tokens; without an environment, one turn."""
        return (self.response_text,) if self.environment is None else self.environment.turns

    @property
    def last_message(self) -> str:
        """The last turn, with the opening tag of thought that the chat template wrote into the prompt."""
        return self.opened + self.turns[-1]

    @property
    def environment_failure(self) -> Failure | None:
        """Why the environment failed, so that the sample is dropped; None if it did not."""
        return None if self.environment is None else self.environment.failure

    @property
    def own_tokens(self) -> int:
        """Number of the response's tokens that the model wrote, in all conversations."""
        own = len(self.response_tokens) - self.observed_tokens
        return own + sum(other.own_tokens for other in self.others)

    @property
    def observed_tokens(self) -> int:
        """Number of the response's tokens that the environment wrote, without further conversations."""
        return 0 if self.response_mask is None else len(self.response_mask) - sum(self.response_mask)
