"""Score a step's samples with all reward functions of a run."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor
from typing_extensions import Self

from anytron.base.errors import ConfigError, DataError
from anytron.config.diagnostics import refuse
from anytron.config.imports import resolve
from anytron.config.options import model_diagnostics
from anytron.config.scoring import REWARD_MODEL
from anytron.task.rewards.answer import CHECK_MACHINE, CHECK_PROMPT, LARGEST, REWARDS_FUNCTION, Failure
from anytron.task.rewards.pool import RewardPool, Scored, reward_error
from anytron.task.rewards.registered import REWARDS, made

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from anytron.config.scoring import RewardSection
    from anytron.task.data.table import PromptTable
    from anytron.task.rewards.sample import Sample


T = TypeVar("T")

NAMED = 6
"""Most prompts that an error names; it counts all refused prompts."""


@dataclass(frozen=True)
class RewardScores:
    """Rewards of a step.

    Attributes:
        total: float32 ``[N]``, the weighted sum, 0 without functions; NaN for a sample that is dropped.
        parts: By the function's name: float32 ``[N]``, its rewards without weight. They are NaN where the environment
            failed; where the function failed, they are NaN if ``on_error`` is ``drop``, else 0.
        failures: By the function's name: the samples for which it failed, by index, with the reason.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    failures: Mapping[str, Mapping[int, Failure]]


@dataclass(frozen=True)
class RewardSum:
    """All reward functions of a run.

    Attributes:
        sections: The configuration section of each reward, by the reward's name.
    """

    sections: Mapping[str, RewardSection]

    @classmethod
    def from_config(cls, sections: Sequence[RewardSection]) -> RewardSum:
        """Find the functions, and check that they accept their options.

        Raises:
            ConfigError: A function does not exist or does not accept its options, or two have the same name.
        """
        named: dict[str, RewardSection] = {}
        for index, section in enumerate(sections):
            key = f"rewards[{index}].function"
            registered = REWARDS.get(section.function)
            if isinstance(registered, type) and issubclass(registered, BaseModel):
                refuse(model_diagnostics(registered, section.options, f"rewards[{index}].options"))
            resolve(section.function, REWARDS_FUNCTION, key=key, registered=REWARDS, options=section.options)
            name = section.name or section.function.rpartition(":")[2]
            if name in named:
                raise ConfigError(
                    f"Two rewards are called {name}.",
                    where=key,
                    why="metrics and logs are named after rewards",
                    fix="set the key `name` of this reward to a different name",
                )
            named[name] = section
        return cls(named)

    def check(self, tables: Sequence[PromptTable]) -> None:
        """Let rewards that are classes check this machine and the run's prompts, before an engine is built.

        Args:
            tables: The prompts of each source of the run.

        Raises:
            ConfigError: A reward cannot work here, or cannot be made with its options.
            DataError: A reward cannot score the responses to a prompt.
        """
        for index, (name, section) in enumerate(self.sections.items()):
            key = f"rewards[{index}] ({name})"
            reward = made(section.function, section.options, key)
            try:
                if hasattr(reward, "check_machine"):
                    CHECK_MACHINE.call(reward.check_machine, key, kind=ConfigError)
            except ConfigError as error:
                raise ConfigError(error.what, where=key, why=error.why, fix=error.fix) from error
            first, bad, named = None, 0, list[str]()
            # The verdict of a registered reward depends on nothing but its options and the prompts.
            known = section.model_dump(include={"function", "options"}) if section.function in REWARDS else None
            for table in tables if hasattr(reward, "check_prompt") else ():
                if known is not None and table.passed(known):
                    continue
                before = bad
                for prompt, data in table.data():
                    if (refused := _refused(reward, data, f"{key}, prompt {prompt}")) is not None:
                        first, bad = first or refused, bad + 1
                        if len(named) < NAMED:
                            named.append(prompt)
                if known is not None and bad == before:
                    table.note_pass(known)
            if first is not None:
                others = "is 1 other bad prompt" if bad == 2 else f"are {bad - 1} other bad prompts"
                more = f"there {others}: {', '.join(named[1:])}" if bad > 1 else ""
                where = f"prompt {named[0]}, for {key}"
                why = "; ".join(filter(None, (first.why, more)))
                raise DataError(first.what, where=where, why=why, fix=first.fix)

    def unusable(self) -> Callable[[Mapping[str, Any]], str]:
        """Make a function that returns why a reward refuses a prompt's data, or "" if all rewards accept it.

        Raises:
            ConfigError: A reward cannot be made with its options.
        """
        keys = [f"rewards[{index}] ({name})" for index, name in enumerate(self.sections)]
        rewards = [made(one.function, one.options, key) for key, one in zip(keys, self.sections.values(), strict=True)]
        checking = [(reward, key) for reward, key in zip(rewards, keys, strict=True) if hasattr(reward, "check_prompt")]

        def why(data: Mapping[str, Any]) -> str:
            found = (_refused(reward, data, key) for reward, key in checking)
            refused = next((one for one in found if one is not None), None)
            return "" if refused is None else refused.why or refused.what

        return why

    def start(self, logs: Path, start_timeout_s: float) -> RewardWorkers:
        """Start the processes that call the functions, without waiting for them.

        Args:
            logs: Directory of the logs; created if missing.
            start_timeout_s: Seconds that a process may take to start and find its function.
        """
        logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as started:
            pools = [
                started.enter_context(RewardPool(name, section, f"rewards[{index}]", logs, start_timeout_s))
                for index, (name, section) in enumerate(self.sections.items())
                if section.function != REWARD_MODEL
            ]
            started.pop_all()
        return RewardWorkers(self.sections, pools)


class RewardModel(Protocol):
    """Ranks that hold a reward model."""

    def begin(self, samples: Sequence[Sample]) -> Callable[[], list[float]]:
        """Start to score prompts and responses; the returned function waits and returns the scores."""


class RewardWorkers:
    """Reward functions in their processes, and a reward model. A context manager: leaving ends the processes.

    Args:
        sections: Sections of all rewards, by name.
        pools: Processes of the rewards that are functions.
        model: The reward model, for the other rewards; None = all rewards are functions.

    Attributes:
        pools: Processes of the rewards that are functions.
    """

    def __init__(
        self, sections: Mapping[str, RewardSection], pools: Sequence[RewardPool], model: RewardModel | None = None
    ) -> None:
        self._sections, self.pools, self._model = sections, pools, model

    def beside(self, model: RewardModel | None) -> RewardWorkers:
        """Combine these processes with the run's reward model, if it has one."""
        return RewardWorkers(self._sections, self.pools, model)

    def __call__(self, samples: Sequence[Sample], *, more: bool = False) -> RewardScores:
        """Score samples by every function and the reward model. Samples whose environment failed are dropped unscored.

        Args:
            samples: Samples of a step, at least one.
            more: Whether the step has further samples, and no function failed for all of them. Then it is not an error
                if a function fails for all of ``samples``.

        Raises:
            DataError: A function fails for a sample and its ``on_error`` is ``stop``, or for every sample of the step;
                every sample is dropped; or a weighted reward is too large.
        """
        whole = [index for index, sample in enumerate(samples) if sample.environment_failure is None]
        plain = [_plain(samples[index]) for index in whole]
        parts: dict[str, Tensor] = {}
        failures: dict[str, Mapping[int, Failure]] = {}
        scored = self._scored(plain, more=more)
        for name, section in self._sections.items():
            values, found = scored[name]
            failures[name] = {whole[index]: failure for index, failure in found.items()}
            missing = float("nan") if section.on_error == "drop" else 0.0
            parts[name] = torch.full((len(samples),), float("nan"))
            parts[name][whole] = torch.tensor([missing if value is None else value for value in values])
        nothing = torch.full((len(samples),), float("nan"))
        nothing[whole] = 0.0
        total = sum(
            (_weighted(name, section.weight, parts[name], samples) for name, section in self._sections.items()), nothing
        )
        if total.isnan().all() and not more:
            name, first = next((name, found) for name, found in failures.items() if found)
            raise DataError(
                "Every sample of the step was dropped.",
                where=f"rewards {', '.join(name for name, found in failures.items() if found)}",
                why=f"for each of them, a reward or the environment failed; the first failure of {name}: "
                f"{first[min(first)].what}\n{first[min(first)].why}",
                fix="correct the functions that failed; the step's samples are in samples.jsonl",
            )
        return RewardScores(total, parts, failures)

    def _scored(self, samples: Sequence[Sample], *, more: bool) -> dict[str, Scored]:
        """Let the model and all functions score samples at the same time."""
        asking = {name: one for name, one in self._sections.items() if one.function == REWARD_MODEL}
        scores: Callable[[], list[float]] = list
        if asking and samples:
            assert self._model is not None, "a reward that asks one needs a section reward_model"
            scores = self._model.begin(samples)
        found = side_by_side([(pool, pool.score(samples, more=more)) for pool in self.pools])
        by_function = {pool.name: one for pool, one in zip(self.pools, found, strict=True) if one is not None}
        return by_function | (judged(asking, scores(), samples, more=more) if asking else {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self.pools:
            pool.close()


def judged(
    sections: Mapping[str, RewardSection], scores: Sequence[float], samples: Sequence[Sample], *, more: bool
) -> dict[str, Scored]:
    """Convert the scores of a reward model to rewards.

    Args:
        sections: Sections of ``rewards`` that use the reward model, by name.
        scores: A score for each sample.
        samples: Samples of a step.
        more: Whether the step has further samples, some of which have a score already.

    Raises:
        DataError: The score of a sample is not finite and ``on_error`` is ``stop``, or no score is finite.
    """
    failures = {
        index: Failure(
            f"The reward model returned the score {score}.",
            f"rewards must be finite and between -{LARGEST:g} and {LARGEST:g}: any other would make every weight of "
            "the model NaN",
            "run anytron verify, and look at its check reward-model-scores; if the reward model overflows in bfloat16, "
            "begin a new run with model.dtype=float32",
            sample=index,
        )
        for index, score in enumerate(scores)
        if not (math.isfinite(score) and abs(score) <= LARGEST)
    }
    values = [None if index in failures else score for index, score in enumerate(scores)]
    for name, section in sections.items():
        hopeless = len(failures) == len(values) and not more
        if failures and (section.on_error == "stop" or hopeless):
            first = min(failures)
            raise reward_error(name, failures[first], samples[first], every=hopeless)
    return dict.fromkeys(sections, (values, failures))


def _weighted(name: str, weight: float, values: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Multiply a function's rewards by its weight, and refuse results beyond :data:`LARGEST`."""
    weighted = weight * values
    for index in (weighted.abs() > LARGEST).nonzero().flatten().tolist()[:1]:
        raise DataError(
            "A weighted reward is too large.",
            where=f"reward {name}, prompt {samples[index].prompt_id}",
            why=f"{weight:g} * {values[index]:g} is not between -{LARGEST:g} and {LARGEST:g}",
            fix=f"lower the weight of the reward {name} (rewards[].weight), or let the reward return smaller numbers",
        )
    return weighted


def joined(found: Sequence[RewardScores]) -> RewardScores:
    """Join the scores of a step's rounds, in order."""
    failures: dict[str, dict[int, Failure]] = {name: {} for name in found[0].failures}
    before = 0
    for one in found:
        for name, failed in one.failures.items():
            failures[name] |= {before + index: failure for index, failure in failed.items()}
        before += len(one.total)
    parts = {name: torch.cat([one.parts[name] for one in found]) for name in found[0].parts}
    return RewardScores(torch.cat([one.total for one in found]), parts, failures)


def side_by_side(
    work: Sequence[tuple[RewardPool, Generator[None, None, T]]], until: float = math.inf
) -> list[T | None]:
    """Let the processes of several rewards work at the same time.

    Args:
        work: A generator for each pool, which yields whenever it must wait for a process of the pool.
        until: When to stop waiting, on the clock of :func:`time.monotonic`.

    Returns:
        The result of each generator; None for unfinished ones, whose busy processes have been ended.
    """
    found: dict[int, T] = {}
    try:
        while len(found) < len(work):
            for index, (_, scoring) in enumerate(work):
                if index not in found:
                    try:
                        next(scoring)
                    except StopIteration as finished:
                        found[index] = finished.value
            busy = [pool for index, (pool, _) in enumerate(work) if index not in found]
            if monotonic() >= until:
                break
            if busy:
                left = min(until, *(pool.deadline for pool in busy)) - monotonic()
                wait([one for pool in busy for one in pool.connections], max(0.0, left))
    finally:
        for _, one in work:
            one.close()  # if one has raised, the others are not waited for
    return [found.get(index) for index in range(len(work))]


def _refused(reward: Any, data: Mapping[str, Any], where: str) -> DataError | None:
    """Return the error with which a reward refuses a prompt, else None. Other exceptions are faults of the reward."""
    try:
        found = CHECK_PROMPT.call(reward.check_prompt, where, data, kind=ConfigError)
    except DataError as error:
        return error
    if found is not None:
        raise CHECK_PROMPT.unusable(reward.check_prompt, f"{found!r}, but only an exception refuses a prompt").error(
            where, ConfigError
        )
    return None


def _plain(sample: Sample) -> Sample:
    """Return a sample as functions get it: without the fields that only the model reads."""
    if sample.patches is None and sample.routing is None and not sample.others:
        return sample
    return replace(sample, patches=None, routing=None, others=())
