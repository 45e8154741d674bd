"""The reward functions that have a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from anytron.errors import DataError

if TYPE_CHECKING:
    from anytron.rewards.sample import Sample

RewardFunction = Callable[..., Sequence[float]]
"""(samples, **options) -> one finite number for each sample."""


def exact_match(samples: Sequence[Sample], key: str = "answer") -> list[float]:
    """Give 1 to a response that is the right answer, else 0. White space around both is ignored.

    Args:
        samples: The samples.
        key: The entry of ``sample.data`` that holds the right answer.

    Raises:
        DataError: A prompt has no such entry.
    """
    return [float(sample.response_text.strip() == str(_entry(sample, key)).strip()) for sample in samples]


def contains(samples: Sequence[Sample], key: str = "answer") -> list[float]:
    """Give 1 to a response that contains the right answer, else 0; otherwise as :func:`exact_match`."""
    return [float(str(_entry(sample, key)).strip() in sample.response_text) for sample in samples]


def _entry(sample: Sample, key: str) -> object:
    if key not in sample.data:
        raise DataError(
            f"The prompt has no entry {key!r}.",
            where=f"prompt {sample.prompt_id}",
            why=f"its data has {', '.join(map(repr, sample.data)) or 'nothing'}",
            fix="set the reward's option key, or give the data to the prompts",
        )
    return sample.data[key]


REWARDS: Mapping[str, RewardFunction] = MappingProxyType({"exact_match": exact_match, "contains": contains})
"""By their name in ``rewards[].function``."""
