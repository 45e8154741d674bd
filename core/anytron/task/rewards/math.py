"""A reward for mathematics, by the library math-verify (the extra ``math``)."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from anytron.base.errors import ConfigError
from anytron.task.rewards.matching import ReferenceReward
from anytron.task.rewards.math_answer import WORDED, Written, last_answer, written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.task.rewards.sample import Sample


_CHOICE = re.compile(r"^\(([a-zA-Z])\)$")
"""A letter of a multiple choice, in parentheses."""


class Math(ReferenceReward):
    r"""Score 1 for a response whose last answer equals the right one as mathematics, else 0.

    The answer is read after the last ``</think>``; a response whose thought does not end has no answer. It is the last
    ``\boxed{...}``, else the last ``<answer>...</answer>``, else the last formula or number. Currency signs, thousands
    separators, units, ``x =`` and surrounding text are ignored, but a different unit of length, mass, volume, time or
    money makes a different answer. A percentage equals both its number and its hundredth. If the right answer is a set
    or a list, the response must have the same elements in any order; in a pair in brackets the order matters.
    math-verify makes the comparison.
    """

    confined: ClassVar[bool] = True
    """The process that scores is confined, because math-verify uses ``sympy.parse_expr``, which calls ``eval``."""

    step_timeout_s: int = Field(5, ge=1)
    """Most seconds for reading an answer, and most seconds for comparing it with the right answer."""

    def examine_answer(self, answer: object) -> str | None:
        """As in the base class, but any finite number is accepted, and the answer itself must score 1 as a response.

        A text without an answer, such as ``$`` or a thought, is refused, because every response would score 0. No
        formula is evaluated, so that all rows of a table can be checked: a row takes microseconds, while math-verify
        takes milliseconds.
        """
        if isinstance(answer, float) and isfinite(answer):
            return None
        why = super().examine_answer(answer)
        if why is not None or _answers_itself(_behind_thought(str(answer))):
            return why
        return f"{str(answer)[:40]!a} is neither a number, a formula nor a word: no response would be right"

    def check_machine(self) -> None:
        """Check that the library is installed.

        Raises:
            ConfigError: The library is not installed.
        """
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise ConfigError("math-verify is not installed.", fix="pip install 'anytron[math]'") from error

    def __call__(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Score samples; a response that takes too long to read or compare is a failure of that sample."""
        return [self._score(sample.last_message, self.reference(sample)) for sample in samples]

    def reference(self, sample: Sample) -> str:
        """Return the right answer as text; a leading thought is removed, as in a response."""
        return _behind_thought(super().reference(sample))

    def _score(self, response: str, reference: str) -> float | Exception:
        from math_verify.errors import TimeoutException

        if _as_text(response, reference):
            return 1.0
        given = last_answer(response)
        if given is None or _cut_off(response):
            return 0.0
        right = written(_unwrapped(reference))
        try:
            return float(self._equal(right, written(given)))
        except TimeoutException:
            return TimeoutError(
                f"math-verify took more than {self.step_timeout_s} s for this response; the reward's option "
                "step_timeout_s raises the limit"
            )

    def _equal(self, right: Written, given: Written) -> bool:
        """Whether two answers are equal: as sets where they have several elements, whatever their order."""
        if len(right.elements) != len(given.elements) or (right.unit and given.unit and right.unit != given.unit):
            return False
        left = list(given.elements)
        for element in right.elements:
            same = next((one for one in left if self._same(element, right.percent, one, given.percent)), None)
            if same is None:
                return False
            left.remove(same)
        return True

    def _same(self, right: str, percent: bool, given: str, given_percent: bool) -> bool:
        """Whether two elements are equal. A percentage equals its number and its hundredth: 50 % is 50 and 0.5."""
        if self._verified(right, given):
            return True
        if percent == given_percent:
            return False
        return self._verified(f"({right})/100", given) if percent else self._verified(right, f"({given})/100")

    def _verified(self, right: str, given: str) -> bool:
        """Whether math-verify finds two answers equal.

        Raises:
            TimeoutException: It took too long.
        """
        from math_verify import parse, verify

        if right == given:
            return _says_something(right)
        if "\\" in right and right.lower() == given.lower():
            return False  # math-verify takes a capital Greek letter for its small one
        try:
            both = [
                parse(f"\\boxed{{{one}}}", parsing_timeout=self.step_timeout_s, raise_on_error=True)
                for one in (right, given)
            ]
            return bool(verify(*both, timeout_seconds=self.step_timeout_s, raise_on_error=True))
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            NotImplementedError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            return False  # no mathematics, as sympy says in many ways


def _cut_off(response: str) -> bool:
    """Whether a response ends in a thought: there is no answer."""
    return response.rfind("<think>") > response.rfind("</think>")


def _behind_thought(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def _as_text(response: str, reference: str) -> bool:
    """Whether a response is the right answer as text, which covers answers without mathematics, such as ``yes``."""
    if _cut_off(response):
        return False
    letters = _text(reference)
    return bool(letters) and (
        letters == _text(_behind_thought(response)) or letters == _text(last_answer(response) or "")
    )


def _answers_itself(answer: str) -> bool:
    """Whether an answer is right as a response to its own prompt; math-verify need not be asked."""
    if _as_text(answer, answer):
        return True
    given = None if _cut_off(answer) else last_answer(answer)
    if given is None:
        return False
    right = written(_unwrapped(answer)).elements
    return right == written(given).elements and all(map(_says_something, right))


def _says_something(answer: str) -> bool:
    """Whether an answer has a letter or a digit: a sign alone is no answer."""
    return any(letter.isalnum() for letter in answer)


def _unwrapped(reference: str) -> str:
    """The right answer without a sentence or a box around it."""
    if "\\boxed" in reference or "<answer>" in reference:
        return last_answer(reference) or reference
    return reference


def _text(answer: str) -> str:
    """Return an answer as plain words, to compare answers without mathematics; with LaTeX commands, keep capitals."""
    plain = WORDED.sub(lambda found: found[1], answer).strip().strip("$").rstrip(".").strip()
    plain = _CHOICE.sub(r"\1", plain)
    return " ".join((plain if "\\" in plain else plain.lower()).split())
