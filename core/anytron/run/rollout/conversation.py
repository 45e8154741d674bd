"""One response of several turns while it is being generated, and the tokens of an environment's observations in it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from anytron.base.errors import DataError
from anytron.base.seeds import derive_seed
from anytron.config.json_files import is_writable
from anytron.task.data.processor_time import processor_time
from anytron.task.data.prompts import TEMPLATE_SECONDS
from anytron.task.environments import Task, Turn
from anytron.task.environments.protocol import Outcome
from anytron.task.isolation.failure import Failure
from anytron.workers.engines.rollout_engine import PromptInputs, Response, longer_routing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.environments import Observation
    from anytron.task.environments.protocol import Message
    from anytron.workers.engines.rollout_engine import SamplingParams, StopReason

TURN = "anytron stands for a turn"
"""Placeholder for the model's turns when the chat template is rendered: only the text after them is used."""
HOPELESS = 16
"""The run ends if this many conversations have failed before any environment answered: its code is at fault."""


class Tried(Protocol):
    """A response that an environment or an agent takes part in."""

    @property
    def prompt(self) -> TokenizedPrompt:
        """The prompt."""

    @property
    def failure(self) -> Failure | None:
        """Why it failed; None if it did not."""


@dataclass
class Conversation:
    """The turns of the model and the environment's observations so far. Tokens are only appended.

    Attributes:
        prompt: The prompt of the conversation.
        seed: Seed of everything random in the conversation.
        max_turns: Largest number of turns of the model.
        number: Number of the conversation's environment; -1 before there is one.
        speaking: Whether the model's next turn has been requested and is not complete yet.
        tokens: The tokens after the prompt.
        log_probs, response_mask: As in :class:`Response`, for these tokens.
        turns: The model's turns, decoded.
        versions, routing: As in :class:`Response`.
        reward, metrics: Sums of the environment's rewards and metrics.
        over: Whether the conversation has ended.
        finished: Whether the environment ended it, and not a limit or a failure.
        failure: The failure of the environment that ended the conversation; None without one.
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
        """The task for which the environment is set up."""
        prompt = self.prompt
        seed = derive_seed(self.seed, "environment", 0)
        return Task(prompt.id, prompt.text, dict(prompt.data), seed, self.max_turns)

    def question(self, sampling: SamplingParams, room: int | None) -> tuple[PromptInputs, SamplingParams, int]:
        """Return the request for the model's next turn: all tokens so far, sampling parameters, and a seed.

        Args:
            sampling: How a turn is sampled.
            room: Number of tokens that still fit into the model's context; None = unlimited.
        """
        length = sampling.max_new_tokens if room is None else min(sampling.max_new_tokens, room)
        seed = self.seed if not self.turns else derive_seed(self.seed, "turn", len(self.turns))
        shortest = min(sampling.min_new_tokens, length)
        limited = replace(sampling, max_new_tokens=length, min_new_tokens=shortest)
        return PromptInputs(self.prompt.tokens + self.tokens, self.prompt.patches), limited, seed

    def add_turn(self, response: Response, text: str) -> Turn:
        """Append a response of the model; return the turn for the environment."""
        self.speaking = False
        self._add(response.tokens, response.log_probs, own=True)
        self.turns += (text,)
        self.versions += tuple(response.versions)
        self.routing = longer_routing(self.routing, response.routing)
        return Turn(text, tuple(response.tokens), response.stop_reason == "stop")

    def add_observation(self, tokens: tuple[int, ...]) -> None:
        """Append an observation of the environment."""
        self._add(tokens, (0.0,) * len(tokens), own=False)

    def count(self, observation: Observation) -> None:
        """Add an observation's reward and metrics to the sums."""
        self.reward += observation.reward
        for name, number in observation.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + number

    def end(self, *, finished: bool, failure: Failure | None = None) -> None:
        """End the conversation."""
        self.over, self.finished, self.failure = True, finished, failure

    def response(self) -> Response:
        """Return all turns as one response."""
        reason: StopReason = "stop" if self.finished else "length"
        outcome = Outcome(self.turns, self.reward, self.metrics, self.failure)
        return Response(self.tokens, self.log_probs, reason, self.versions, self.routing, self.response_mask, outcome)

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float], *, own: bool) -> None:
        self.tokens += tuple(tokens)
        self.log_probs += tuple(log_probs)
        self.response_mask += (own,) * len(tokens)


def observation_tokens(
    observation: Observation, last: int | None, tokenizer: Any, vocab_size: int, chat_template_kwargs: Mapping[str, Any]
) -> tuple[int, ...] | Failure:
    """Tokenise an observation by itself; return a failure if it has no tokens, or tokens that the model does not know.

    Args:
        observation: Observation that has text, messages or tokens.
        last: The last token of the model; None if it wrote none. If it is the end token that the chat template writes
            after a turn, it is not repeated.
        tokenizer: A Hugging Face tokenizer.
        vocab_size: Token ids are below this.
        chat_template_kwargs: Further arguments of the chat template.
    """
    try:
        if observation.messages is not None:
            tokens = _encoded(_rendered(observation.messages, tokenizer, chat_template_kwargs), tokenizer)
            tokens = tokens[1:] if tokens and tokens[0] == last else tokens
        elif observation.text is not None:
            tokens = _encoded(observation.text, tokenizer)
        else:
            tokens = tuple(observation.tokens or ())
    except Exception as error:  # noqa: BLE001 - the model's template is a program, and may fail
        fix = "give each message a role and a content that the template knows"
        if isinstance(error, ChatTemplateError):
            fix = "let the environment return text or tokens instead of messages, or use a template that keeps messages"
        return Failure("An observation cannot be tokenised.", f"{type(error).__name__}: {error}", fix)
    if not tokens:
        why = "the model would continue as if it had not stopped"
        return Failure("An observation has no tokens.", why, "return text, or end the episode")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        why = f"its ids are from {min(tokens)} to {max(tokens)}, but the vocabulary has {vocab_size} tokens"
        return Failure(
            "An observation has a token that the model does not know.", why, "return text, or known token ids"
        )
    return tokens


class ChatTemplateError(ValueError):
    """A chat template has not kept earlier messages as they are."""


def _encoded(text: str, tokenizer: Any) -> tuple[int, ...]:
    if not is_writable(text):
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is not a character")
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered(messages: Sequence[Message], tokenizer: Any, template: Mapping[str, Any]) -> str:
    """Render what follows a turn of the model, up to the beginning of its next turn."""
    before = [{"role": "user", "content": TURN}, {"role": "assistant", "content": TURN}]
    with processor_time(TEMPLATE_SECONDS):
        text: str = tokenizer.apply_chat_template(
            [*before, *messages], add_generation_prompt=True, tokenize=False, **template
        )
    if text.count(TURN) != 2:
        raise ChatTemplateError(
            f"the chat template drops, repeats or changes an earlier message of the user or the assistant: {text!r}"
        )
    return text.rpartition(TURN)[2]


def check_hope(failed: Sequence[Tried], limit: int) -> None:
    """Check that fewer responses than ``limit`` have failed.

    Raises:
        DataError: ``limit`` responses or more have failed; the run ends.
    """
    if len(failed) < limit:
        return
    failure = failed[0].failure
    assert failure is not None, "these have failed"
    raise DataError(
        failure.what,
        where=f"environment, prompt {failed[0].prompt.id} (for every sample so far)",
        why=failure.why,
        fix=failure.fix,
    )
