"""Rewards that compare a response with the right answer, which stands in the prompt's data."""

from __future__ import annotations

from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

from anytron.config.section import Section
from anytron.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.rewards.sample import Sample


class ReferenceReward(Section):
    """A reward that needs an entry of the prompt's data."""

    key: str = "answer"
    """The entry of the prompt's data that holds the right answer: a text that is not empty, or a number."""

    def check_prompt(self, data: Mapping[str, Any]) -> None:
        """Find out before the run whether a prompt has a right answer.

        Raises:
            DataError: It has none, or one that is neither text nor a number.
        """
        right_answer(data, self.key)

    def right_answer(self, data: Mapping[str, Any]) -> str:
        """The right answer as a model has to write it, without white space around it.

        Raises:
            DataError: As :meth:`check_prompt`.
        """
        return right_answer(data, self.key)


def right_answer(data: Mapping[str, Any], key: str) -> str:
    """Read the right answer among a prompt's data.

    A number stands for its decimal digits: 3 and 3.0 are ``3``, as columns of integers become floats where one is
    missing; 0.5 is ``0.5``, 1e6 is ``1000000``. Nothing else becomes text: a response would earn its reward with
    ``None``, or with nothing.

    Args:
        data: The prompt's data.
        key: The entry.

    Returns:
        The answer without white space around it; not empty.

    Raises:
        DataError: There is no such entry, or it holds neither text nor a finite number, or an empty text.
    """
    if key not in data:
        raise DataError(
            f"The prompt has no entry {key!r}.",
            why=f"its data has {', '.join(map(repr, data)) or 'nothing'}",
            fix="set the reward's option key, or give the data to the prompts",
        )
    value = data[key]
    text = plain_text(value)
    if text is not None and text.strip():
        return text.strip()
    raise DataError(
        "The right answer cannot be read.",
        why=f"the prompt's entry {key!r} is null, or its row has no such column"
        if value is None
        else f"the prompt's entry {key!r} is an empty text"
        if text is not None
        else f"the prompt's entry {key!r} is {type(value).__name__}: {str(value)[:80]}",
        fix="give the prompt a text that is not empty or a finite number, or remove its row",
    )


def plain_text(value: object) -> str | None:
    """Give a text as it is and a finite number as its decimal digits; None for everything else, true and false too."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        return None
    try:
        number = Decimal(str(value))  # of a float, the shortest digits that are read as it
    except (ArithmeticError, ValueError):  # a fraction; an integer with more digits than Python writes
        return None
    if not number.is_finite():
        return None
    digits = format(number or Decimal(0), "f")  # no negative zero
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


class ExactMatch(ReferenceReward):
    """Give 1 to a response that is the right answer, else 0. White space around both is ignored.

    Where there is an environment, the response is what the model wrote in its last turn; so in all that follow.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(sample.turns[-1].strip() == self.right_answer(sample.data)) for sample in samples]


class Contains(ReferenceReward):
    """Give 1 to a response that contains the right answer, else 0."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(self.right_answer(sample.data) in sample.turns[-1]) for sample in samples]
