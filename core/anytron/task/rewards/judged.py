"""Rewards that a model gives: what the driver asks, and what becomes of numbers that are none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from anytron.base.errors import DataError
from anytron.task.rewards.answer import LARGEST, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.config.scoring import RewardSection
    from anytron.task.rewards.pool import Scored
    from anytron.task.rewards.sample import Sample


class RewardModel(Protocol):
    """Ranks that hold a reward model."""

    def begin(self, samples: Sequence[Sample]) -> Callable[[], list[float]]:
        """Let it read prompts and responses, and don't wait; what is returned does, and gives a number for each."""


def judged(
    sections: Mapping[str, RewardSection], scores: Sequence[float], samples: Sequence[Sample], *, more: bool
) -> dict[str, Scored]:
    """Take what a model says of samples for what functions say.

    Args:
        sections: Those of ``rewards`` that ask it, by name.
        scores: A number for each sample.
        samples: Of a step.
        more: The step has others, among which some have a number.

    Raises:
        DataError: It has no finite number for a sample and ``on_error`` is ``stop``, or for none of them.
    """
    failures = {
        index: Failure(
            f"The reward model gives {score}.",
            f"rewards must be finite, and within {LARGEST:g} either way: one that is not would reach every weight of "
            "the model",
            "see what anytron verify says of it (reward-model-scores); weights that overflow in bfloat16 need a "
            "new run with model.dtype=float32",
            sample=index,
        )
        for index, score in enumerate(scores)
        if not (math.isfinite(score) and abs(score) <= LARGEST)
    }
    values = [None if index in failures else score for index, score in enumerate(scores)]
    for name, section in sections.items():
        hopeless = len(failures) == len(values) and not more
        if failures and (section.on_error == "stop" or hopeless):
            first = failures[min(failures)]
            sample = samples[min(failures)]
            where = f"reward {name}, prompt {sample.prompt_id}, response {sample.response_text[:80]!r}"
            raise DataError(
                first.what,
                where=f"{where} (for every sample of the step)" if hopeless else where,
                why=first.why,
                fix=f"{first.fix}; the step's samples are in samples.jsonl",
            )
    return dict.fromkeys(sections, (values, failures))
