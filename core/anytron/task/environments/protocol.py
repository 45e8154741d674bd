"""The interface of an environment: its class, its inputs and its answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from anytron.base.functions import Called, Kind, has

if TYPE_CHECKING:
    from anytron.task.isolation.failure import Failure


Message = Mapping[str, Any]
"""A chat message: ``role``, ``content``, and whatever else the chat template reads."""

NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Task:
    """The task of an environment in one conversation.

    Attributes:
        prompt_id: The prompt's name in its source.
        prompt_text: The prompt's text; decoded if the source gave token ids. The model has read it.
        data: The prompt's data from the source, for example the right answer.
        seed: A seed in ``[0, 2**63)``, different for each response, and the same when the run is repeated.
        max_turns: Largest number of the model's turns; the model does not read the observation after the last turn.
    """

    prompt_id: str
    prompt_text: str
    data: Mapping[str, Any]
    seed: int
    max_turns: int


@dataclass(frozen=True)
class Turn:
    """What the model wrote after the previous observation.

    Attributes:
        text: The turn as text, decoded without special tokens.
        tokens: Token ids, the end token included if there is one; may be empty.
        finished: True if an end token or a stop string ended the turn, False if ``rollout.max_new_tokens`` did.
    """

    text: str
    tokens: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Observation:
    """The answer of an environment to a turn: what the model reads next, or the end of the conversation.

    The model reads one of ``text``, ``messages`` and ``tokens``. The new tokens are appended to those of the
    conversation, which are never tokenised again.

    Attributes:
        text: A text, tokenised as is, separately from the tokens before it.
        messages: Messages, rendered by the tokenizer's chat template up to where the model's next turn begins.
        tokens: Token ids.
        done: Whether the conversation is over; then there is nothing to read.
        reward: Reward of this turn; the rewards of all turns are added up.
        metrics: Numbers that are added up over the turns, for example ``{"tool_calls": 1}``.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: Not exactly one of ``text``, ``messages`` and ``tokens`` is given, or one is given together with
            ``done``; or a number is not finite.
    """

    text: str | None = None
    messages: Sequence[Message] | None = None
    tokens: Sequence[int] | None = None
    done: bool = False
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=lambda: NOTHING)

    def __post_init__(self) -> None:
        given = [name for name in ("text", "messages", "tokens") if getattr(self, name) is not None]
        if len(given) != (0 if self.done else 1):
            wanted = "an observation with done=True must have none" if self.done else "an observation must have one"
            raise ValueError(f"{wanted} of text, messages and tokens, and this one has {' and '.join(given) or 'none'}")
        if self.text is not None and not isinstance(self.text, str):
            raise TypeError(f"an observation's text has the type {type(self.text).__name__}, not str")
        if self.messages is not None and not _are(self.messages, Mapping):
            raise TypeError("an observation's messages are not a list of mappings")
        if self.tokens is not None and not _are(self.tokens, int):
            raise TypeError("an observation's tokens are not a list of integers")
        if not isinstance(self.metrics, Mapping):
            raise TypeError(
                f"an observation's metrics have the type {type(self.metrics).__name__}, which is not a mapping"
            )
        for name, number in {"reward": self.reward, **self.metrics}.items():
            if not _is_finite(number):
                raise ValueError(f"{name} is {number!r}, not a finite number")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for :meth:`from_json`."""
        return {
            "text": self.text,
            "messages": None if self.messages is None else [dict(message) for message in self.messages],
            "tokens": None if self.tokens is None else [int(token) for token in self.tokens],
            "done": bool(self.done),
            "reward": float(self.reward),
            "metrics": {str(name): float(number) for name, number in self.metrics.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Observation:
        """Make an observation from the value of :meth:`as_json`.

        Raises:
            TypeError, ValueError: The value is malformed.
        """
        return cls(**record)


class Environment(Protocol):
    """The environment of one conversation; for each response, a new one is made with ``environment.options``.

    It runs in a separate process. It may also have a method ``close()``, which is called at the end of the
    conversation, also if ``reset`` or ``step`` has failed, unless the process has ended. Calls are not concurrent.
    Between two calls for one conversation, the process may make calls for other conversations.
    """

    def reset(self, task: Task) -> None:
        """Set up the environment for a prompt that the model has read. This is the first call."""

    def step(self, turn: Turn) -> Observation:
        """Answer a turn of the model."""


@dataclass(frozen=True, repr=False)
class AgentTask(Task):
    """The task of an agent: a program that talks to the model by OpenAI's API, in a session of its own.

    Attributes:
        base_url: Address of the API, for example ``http://127.0.0.1:41234/v1``.
        api_key: Key of the session, which nothing else may use. The representation of the task does not show it.
        model: Name of the model in requests.
    """

    base_url: str
    api_key: str
    model: str

    def __repr__(self) -> str:
        return f"AgentTask(prompt_id={self.prompt_id!r}, base_url={self.base_url!r})"


@dataclass(frozen=True)
class AgentResult:
    """The result of an agent.

    Attributes:
        reward: The reward of the whole session; None = the agent has sent it by ``POST /v1/reward``.
        metrics: Numbers that are averaged over samples, for example ``{"tool_calls": 1}``.

    Raises:
        TypeError: ``metrics`` is not a mapping.
        ValueError: A number is not finite.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: NOTHING)

    def __post_init__(self) -> None:
        if not isinstance(self.metrics, Mapping):
            raise TypeError(f"an agent's metrics have the type {type(self.metrics).__name__}, which is not a mapping")
        for name, number in {**({} if self.reward is None else {"reward": self.reward}), **self.metrics}.items():
            if not _is_finite(number):
                raise ValueError(f"{name} is {number!r}, not a finite number")

    @classmethod
    def of(cls, found: object) -> AgentResult:
        """Read what an agent's function returned: a result, a number, or None.

        Raises:
            TypeError, ValueError: It is none of them, or not finite.
        """
        if isinstance(found, cls):
            return found
        if found is None or isinstance(found, Real):
            return cls(None if found is None else float(found))
        raise TypeError(f"it is a {type(found).__name__}")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for :meth:`from_json`."""
        numbers = {str(name): float(number) for name, number in self.metrics.items()}
        return {"reward": None if self.reward is None else float(self.reward), "metrics": numbers}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> AgentResult:
        """Make a result from the value of :meth:`as_json`.

        Raises:
            TypeError, ValueError: The value is malformed.
        """
        return cls(**record)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a response in an environment.

    Attributes:
        turns: The model's text in each turn, decoded without special tokens; at least one.
        reward: Sum of the environment's rewards.
        metrics: The environment's metrics, each summed over the turns.
        failure: Why the environment failed, so that the sample is dropped; None if it did not.
    """

    turns: tuple[str, ...]
    reward: float
    metrics: Mapping[str, float]
    failure: Failure | None = None


MADE = Called(
    "An environment's class",
    given="the entries of environment.options are its keyword arguments",
    gives="an object with methods reset and step",
)

RESET = Called("An environment's method reset", ("task",), f"task is a Task, and {has(Task)}", method="reset")

STEP = Called(
    "An environment's method step",
    ("turn",),
    f"turn is a Turn, and {has(Turn)}; answer any text of the model with an Observation",
    f"an anytron.tasks.Observation ({has(Observation)})",
    method="step",
)

CLOSE = Called("An environment's method close", method="close", optional=True)

AGENT = Called(
    "An agent",
    ("task",),
    f"task is an AgentTask, and {has(AgentTask)}",
    f"a finite number, an anytron.tasks.AgentResult ({has(AgentResult)}), or None if the reward was sent",
    awaited=True,
)

AGENT_FUNCTION = Kind("environment.agent", AGENT, options=True)

ENVIRONMENT_PATH = Kind("environment.path", MADE, (RESET, STEP, CLOSE), options=True)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _are(values: object, kind: type) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(one, kind) for one in values)
