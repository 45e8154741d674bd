"""The reward functions that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from anytron.errors import DataError

if TYPE_CHECKING:
    from anytron.environments.outcome import Outcome
    from anytron.rewards.sample import Sample

RewardFunction = Callable[..., Sequence[float]]
"""(samples, **options) -> one finite number for each sample."""


def exact_match(samples: Sequence[Sample], key: str = "answer") -> list[float]:
    """Give 1 to a response that is the right answer, else 0. White space around both is ignored.

    Where there is an environment, the response is what the model wrote in its last turn.

    Args:
        samples: The samples.
        key: The entry of ``sample.data`` that holds the right answer.

    Raises:
        DataError: A prompt has no such entry.
    """
    return [float(sample.turns[-1].strip() == str(_entry(sample, key)).strip()) for sample in samples]


def contains(samples: Sequence[Sample], key: str = "answer") -> list[float]:
    """Give 1 to a response that contains the right answer, else 0; otherwise as :func:`exact_match`."""
    return [float(str(_entry(sample, key)).strip() in sample.turns[-1]) for sample in samples]


def environment(samples: Sequence[Sample]) -> list[float]:
    """Give what the environment gave, all turns together.

    Raises:
        DataError: There is no environment.
    """
    return [_outcome(sample).reward for sample in samples]


def _outcome(sample: Sample) -> Outcome:
    if sample.environment is None:
        raise DataError("The reward environment needs one.", where="rewards", fix="add a section environment")
    return sample.environment


def _entry(sample: Sample, key: str) -> object:
    if key not in sample.data:
        raise DataError(
            f"The prompt has no entry {key!r}.",
            where=f"prompt {sample.prompt_id}",
            why=f"its data has {', '.join(map(repr, sample.data)) or 'nothing'}",
            fix="set the reward's option key, or give the data to the prompts",
        )
    return sample.data[key]


REWARDS: Mapping[str, RewardFunction] = MappingProxyType(
    {"exact_match": exact_match, "contains": contains, "environment": environment}
)
"""By their name in ``rewards[].function``."""
