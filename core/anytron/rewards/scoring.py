"""Call reward functions and check what they return."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.config.imports import resolve
from anytron.errors import ConfigError, DataError
from anytron.rewards.registered import REWARDS, RewardFunction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.config.schema import RewardSection
    from anytron.rewards.sample import Sample


@dataclass(frozen=True)
class RewardScores:
    """Rewards of a step.

    Attributes:
        total: float32 ``[N]``, the weighted sum.
        parts: float32 ``[N]`` each, by the function's name, without weight.
    """

    total: Tensor
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class Reward:
    """One reward function of a run.

    Attributes:
        name: As the configuration names it.
        function: With its options.
        weight: Its factor in the sum.
    """

    name: str
    function: RewardFunction
    weight: float

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """Score samples.

        Returns:
            float32 ``[len(samples)]``.

        Raises:
            DataError: The function raises, or returns something else than one finite number per sample.
        """
        try:
            scores = self.function(samples)
            if isinstance(scores, Iterator):
                scores = list(scores)  # a generator raises only when it is read
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                "A reward function raised.",
                where=self._where(culprit(error, samples)),
                why="".join(traceback.format_exception(error)).rstrip(),
                fix="correct the function; the step's samples are in samples.jsonl",
            ) from error
        rewards = torch.tensor(self._numbers(scores, samples), dtype=torch.float32)
        for sample, value in zip(samples, rewards.tolist(), strict=True):
            if not math.isfinite(value):
                raise DataError(
                    f"A reward is {value}.",
                    where=self._where(sample),
                    why="rewards must be finite in float32: one that is not would reach every weight of the model",
                    fix="return a finite number for every sample; the step's samples are in samples.jsonl",
                )
        return rewards

    def _numbers(self, scores: Sequence[float], samples: Sequence[Sample]) -> list[float]:
        try:
            # Users return tensors and arrays as well as lists.
            values: list[Any] = scores.tolist() if hasattr(scores, "tolist") else list(scores)
        except TypeError as error:
            raise DataError(
                "A reward function returned no list.",
                where=self._where(None),
                why=f"it returned {type(scores).__name__}",
                fix="return one number for each sample",
            ) from error
        if len(values) != len(samples):
            raise DataError(
                "A reward function returned the wrong number of rewards.",
                where=self._where(None),
                why=f"{len(values)} rewards for {len(samples)} samples",
                fix="return one number for each sample, in order",
            )
        for sample, value in zip(samples, values, strict=True):
            if not isinstance(value, Real):
                raise DataError(
                    "A reward is not a number.",
                    where=self._where(sample),
                    why=f"it is {value!r}",
                    fix="return one number for each sample",
                )
        return [float(value) for value in values]

    def _where(self, sample: Sample | None) -> str:
        if sample is None:
            return f"reward {self.name}"
        return f"reward {self.name}, prompt {sample.prompt_id}, response {sample.response_text[:80]!r}"


@dataclass(frozen=True)
class RewardSum:
    """All reward functions of a run."""

    rewards: tuple[Reward, ...]

    @classmethod
    def from_config(cls, sections: Sequence[RewardSection]) -> RewardSum:
        """Find the functions.

        Raises:
            ConfigError: One does not exist or does not take its options, or two have the same name.
        """
        rewards: list[Reward] = []
        for index, section in enumerate(sections):
            function = resolve(section.function, key=f"rewards[{index}].function", registered=REWARDS)
            _check_options(function, section.options, index)
            name = section.function.rpartition(":")[2]
            if any(name == reward.name for reward in rewards):
                raise ConfigError(
                    f"Two rewards are called {name}.",
                    where=f"rewards[{index}].function",
                    why="metrics are reported by the function's name",
                    fix="wrap one in a function of another name",
                )
            rewards.append(Reward(name, partial(function, **section.options), section.weight))
        return cls(tuple(rewards))

    def __call__(self, samples: Sequence[Sample]) -> RewardScores:
        """Score samples by every function.

        Raises:
            DataError: A function fails or returns something unusable.
        """
        parts = {reward.name: reward(samples) for reward in self.rewards}
        total = torch.stack([reward.weight * parts[reward.name] for reward in self.rewards]).sum(dim=0)
        return RewardScores(total, parts)


def _check_options(function: RewardFunction, options: Mapping[str, Any], index: int) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # functions written in C may have no signature; calling tells
    try:
        signature.bind([], **options)
    except TypeError as error:
        raise ConfigError(
            "A reward function cannot be called with its options.",
            where=f"rewards[{index}].options",
            why=f"{error}; it takes {signature}",
            fix="the samples come first, the options are keyword arguments",
        ) from error


def culprit(error: BaseException, samples: Sequence[Sample]) -> Sample | None:
    """Find the sample that a function was looking at when it raised.

    It is taken from the local variables of the innermost frame that has one; None if no frame does.
    """
    known = {id(sample): sample for sample in samples}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if id(value) in known:
                return known[id(value)]
    return None
