"""Rewards that compare a response with the right answer, which stands in the prompt's data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.section import Section
from anytron.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.rewards.sample import Sample


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
