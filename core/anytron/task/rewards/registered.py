"""The reward functions with a registered name, and how a reward is made from its section of the configuration."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, DataError
from anytron.config.imports import resolve
from anytron.config.scoring import REWARD_MODEL
from anytron.config.section import Section
from anytron.task.rewards.answer import MADE, REWARDS_FUNCTION
from anytron.task.rewards.code import Code
from anytron.task.rewards.judge import Judge
from anytron.task.rewards.matching import Contains, ExactMatch, Format, ReasoningGym, Regex
from anytron.task.rewards.math import Math

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.task.environments.protocol import Outcome
    from anytron.task.rewards.sample import Sample


def environment(samples: Sequence[Sample]) -> list[float]:
    """Return the reward of the environment, summed over all turns.

    Raises:
        DataError: The run has no environment.
    """
    return [_outcome(sample).reward for sample in samples]


def _outcome(sample: Sample) -> Outcome:
    if sample.environment is None:
        raise DataError(
            "The reward function 'environment' needs an environment.",
            where="rewards",
            why="it returns the reward that the run's environment gives, and this run has no environment",
            fix="add the section environment to the configuration, or remove this reward",
        )
    return sample.environment


class OfModel(Section):
    """Placeholder for the reward model: its ranks, not a function, score samples (``anytron.task.rewards.scoring``)."""


REWARDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "code": Code,
        "contains": Contains,
        "environment": environment,
        "exact_match": ExactMatch,
        "format": Format,
        "judge": Judge,
        "math": Math,
        "reasoning_gym": ReasoningGym,
        "regex": Regex,
        REWARD_MODEL: OfModel,
    }
)
"""The registered rewards, by their name in ``rewards[].function``."""


def made(reference: str, options: Mapping[str, Any], key: str) -> Any:
    """Return a reward function whose options are bound, so that it is called with samples only.

    Args:
        reference: ``rewards[].function``.
        options: ``rewards[].options``.
        key: Configuration key to name in errors.

    Raises:
        ConfigError: The function does not exist, does not accept its options, or raises.
    """
    function = resolve(reference, REWARDS_FUNCTION, key=key, registered=REWARDS, options=options)
    make = partial(function, **options)
    return MADE.call(make, key, kind=ConfigError) if isinstance(function, type) else make
