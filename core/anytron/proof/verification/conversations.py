"""Let the rollout engine hold conversations with a made-up environment, and compare tokens and log-probs.

The environment of the run is not called. It is replaced by one that answers each turn with the results of two tools,
as messages if the model's chat template knows them, otherwise as text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from anytron.base.results import Result
from anytron.base.seeds import derive_seed
from anytron.proof.checks import Inapplicable
from anytron.proof.verification.comparisons import compare_sampled
from anytron.proof.verification.engines import SAMPLES, limited, plan_of
from anytron.run.rollout.conversations import Conversations
from anytron.run.trainer.experience import assemble, make_samples
from anytron.task.environments import Observation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import RolloutPool
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.environments import Task, Turn
    from anytron.workers.engines.rollout_engine import PromptInputs, Response, SamplingParams

TURNS = 3
"""Most turns of the model in a conversation."""
_RESULTS = ({"role": "tool", "content": "1"}, {"role": "tool", "content": "23"})
_TEXT = "123"
_STANDS = "anytron's words"
_LONGEST = 1 << 20


@dataclass
class Recorder:
    """A pool of rollout engines that keeps what it is asked and what it answers.

    Attributes:
        pool: The pool.
        turns: Tokens of each request, and the answer, in the order of the answers.
    """

    pool: RolloutPool
    turns: list[tuple[tuple[int, ...], Response]] = field(default_factory=list)
    _asked: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def has_weights(self) -> bool:
        """Whether the engines have weights."""
        return self.pool.has_weights

    def ask(self, questions: Sequence[tuple[PromptInputs, SamplingParams, int]]) -> list[int]:
        """Ask for a response to each question; return the request numbers."""
        numbers = self.pool.ask(questions)
        self._asked |= {number: tuple(one.tokens) for number, (one, *_) in zip(numbers, questions, strict=True)}
        return numbers

    def poll(self, seconds: float, *others: Any) -> list[tuple[int, Response]]:
        """Return the responses that have finished."""
        found = self.pool.poll(seconds, *others)
        self.turns += [(self._asked[number], response) for number, response in found]
        return found


@dataclass
class TwoTools:
    """A pool of environments, each of which answers a turn at once with the same observation.

    Attributes:
        observation: The observation.
    """

    observation: Observation
    _living: set[int] = field(default_factory=set)
    _answers: deque[tuple[int, Observation]] = field(default_factory=deque)
    _begun: int = 0

    @property
    def busy(self) -> bool:
        """Whether an answer waits."""
        return bool(self._answers)

    def knows(self, number: int) -> bool:
        """Whether an environment lives."""
        return number in self._living

    def begin(self, task: Task) -> int:
        """Begin an environment; return its number."""
        del task
        self._begun += 1
        self._living.add(self._begun)
        return self._begun

    def step(self, number: int, turn: Turn) -> None:
        """Answer a turn."""
        del turn
        self._answers.append((number, self.observation))

    def end(self, number: int) -> None:
        """End an environment."""
        self._living.discard(number)

    def poll(self, seconds: float) -> list[tuple[int, Observation]]:
        """Return the answers."""
        del seconds
        found = list(self._answers)
        self._answers.clear()
        return found


def check_conversations(
    check: str,
    config: RunConfig,
    prepared: PreparedRun,
    rollout: RolloutPool,
    trainer: TrainingWorkers,
    prompts: Sequence[TokenizedPrompt],
) -> Result:
    """Sample conversations; compare their tokens with what was sampled and rendered, and log-probs with training's.

    Args:
        check: Name of the check.
        config: Configuration of the run, with an environment that is no agent.
        prepared: Tokenizer, sampling parameters and limits of the model.
        rollout: The rollout engines, with the training engine's weights.
        trainer: The training ranks.
        prompts: Prompts of the run.

    Raises:
        Inapplicable: No second turn fits into the model's context.
    """
    assert config.environment is not None
    observation, shown = two_results(prepared)
    section = config.environment.model_copy(update={"max_turns": TURNS, "max_observation_tokens": _LONGEST})
    recorder, environments = Recorder(rollout), TwoTools(observation)
    turns = Conversations(
        cast("Any", recorder),
        replace(prepared, sampling=limited(prepared.sampling)),
        cast("Any", environments),
        section,
    )
    begun = turns.begin(prompts, SAMPLES, derive_seed(config.trainer.seed, "verify", 2))
    responses = turns.finish(begun)
    held = [response for group in responses for response in group]
    asked = [prompt.tokens for prompt in prompts for _ in range(SAMPLES)]
    if not any(len(one.environment.turns) > 1 for one in held if one.environment is not None):
        raise Inapplicable("the model's context has no room for a second turn")
    kind = "two messages of tools" if observation.messages is not None else "texts"
    for prompt, response in zip(asked, held, strict=True):
        if mistake := mistake_in(prompt, response, recorder.turns, shown):
            return Result(check, "failed", f"with {kind} between turns, {mistake}")
    samples = make_samples(prompts, responses, prepared.tokenizer)
    batch = assemble(samples, config.rollout.temperature, torch.arange(len(samples)) // SAMPLES)
    log_probs = trainer.score(batch, plan_of(trainer, config), "policy")
    what = f"in turns of {len(held)} conversations, with {kind} between them"
    return compare_sampled(check, config.model.dtype, batch, log_probs, what)


def two_results(prepared: PreparedRun) -> tuple[Observation, tuple[int, ...]]:
    """Make the observation, and render by definition what the model must read after a turn.

    Args:
        prepared: Tokenizer and arguments of the chat template.

    Returns:
        The observation; and the tokens, which begin with what the template writes at the end of a turn.
    """
    tokenizer = prepared.tokenizer
    if tokenizer.chat_template:
        before = [{"role": role, "content": _STANDS} for role in ("user", "assistant")]
        try:
            text = tokenizer.apply_chat_template(
                [*before, *_RESULTS], add_generation_prompt=True, tokenize=False, **prepared.chat_template_kwargs
            )
        except Exception:  # noqa: BLE001 - a template is a program, and may refuse messages of tools
            text = ""
        if text.count(_STANDS) == len(before):
            tail = text.rpartition(_STANDS)[2]
            return Observation(messages=list(_RESULTS)), _encoded(tokenizer, tail)
    return Observation(text=_TEXT), _encoded(tokenizer, _TEXT)


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def mistake_in(
    prompt: tuple[int, ...],
    response: Response,
    turns: Sequence[tuple[tuple[int, ...], Response]],
    shown: tuple[int, ...],
) -> str:
    """Say where a conversation has other tokens than were sampled and shown; empty if it has the same.

    Args:
        prompt: Tokens of the prompt.
        response: The conversation.
        turns: Every request of all conversations, and its answer.
        shown: Tokens that follow each turn but the last, with the end of the turn.
    """
    left, marks = list(zip(response.tokens, response.log_probs, strict=True)), list(response.response_mask or ())
    known, own, number = prompt, list[bool](), 0
    while left:
        number += 1
        said = next((one for asked, one in turns if asked == known and _begins(left, one)), None)
        if said is None:
            return f"turn {number} is not what the rollout engine sampled after these tokens"
        own += [True] * len(said.tokens)
        left = left[len(said.tokens) :]
        known += tuple(said.tokens)
        if not left:
            break
        after = shown[1:] if shown and known[-1] == shown[0] else shown
        if (found := tuple(token for token, _ in left[: len(after)])) != after:
            return f"{list(found)} follow turn {number}, where the whole conversation has {list(after)}"
        own += [False] * len(after)
        known, left = known + after, left[len(after) :]
    return "" if marks == own else "the mask takes tokens of the environment for the model's, or the other way round"


def _begins(tokens: Sequence[tuple[int, float]], said: Response) -> bool:
    """Whether tokens and their log-probs begin with a response of the rollout engine."""
    return tokens[: len(said.tokens)] == list(zip(said.tokens, said.log_probs, strict=True))
