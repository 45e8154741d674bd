"""Rewards that compare a response with the right answer, which stands in the prompt's data."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError
from anytron.config.section import Section

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.task.rewards.sample import Sample


class ReferenceReward(Section):
    """A reward that needs an entry of the prompt's data."""

    key: str = "answer"
    """The entry of the prompt's data that holds the right answer."""

    def check_prompt(self, data: Mapping[str, Any]) -> None:
        """Find out before the run whether a prompt has the entry.

        Raises:
            DataError: It has not.
        """
        if self.key not in data:
            raise DataError(
                f"The prompt has no entry {self.key!r}.",
                why=f"its data has {', '.join(map(repr, data)) or 'nothing'}",
                fix="set the reward's option key, or give the data to the prompts",
            )
        if why := self.examine_answer(data[self.key]):
            raise DataError(
                f"The right answer, entry {self.key!r}, cannot be read.",
                why=why,
                fix="correct the data or the reward's option key, or leave such prompts out: data.on_bad_answer=drop",
            )

    def examine_answer(self, answer: object) -> str | None:
        """Say why an answer cannot be the right one; None if it can. It is looked at in the driver: no evaluation."""
        if answer is None:
            return "it is null: an empty cell, or a column that this row does not have"
        if isinstance(answer, str):
            return None if answer.strip() else "it is empty, and every response contains it"
        if isinstance(answer, int) and not isinstance(answer, bool):
            return None
        if isinstance(answer, float) and not isfinite(answer):
            return f"it is {answer}, which is not a number"
        hint = ": a response with 3 does not equal 3.0" if isinstance(answer, float) else ""
        return f"it is {type(answer).__name__}, {str(answer)[:40]!a}, where a text or a whole number should be{hint}"

    def reference(self, sample: Sample) -> str:
        """The right answer as text, without white space around it."""
        return str(sample.data[self.key]).strip()


class ExactMatch(ReferenceReward):
    """Give 1 to a response that is the right answer, else 0. White space around both is ignored.

    Where there is an environment, the response is what the model wrote in its last turn; so in all that follow.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(sample.turns[-1].strip() == self.reference(sample)) for sample in samples]


class Contains(ReferenceReward):
    """Give 1 to a response that contains the right answer, else 0."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(self.reference(sample) in sample.turns[-1]) for sample in samples]
