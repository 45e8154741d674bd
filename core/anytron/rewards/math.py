"""A reward for mathematics, by the library math-verify (the extra ``math``)."""

from __future__ import annotations

import re
from math import isfinite
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from anytron.errors import ConfigError
from anytron.rewards.math_answer import WORDED, Written, last_answer, written
from anytron.rewards.reference import ReferenceReward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.rewards.sample import Sample


_CHOICE = re.compile(r"^\(([a-zA-Z])\)$")
"""A letter of a multiple choice, in parentheses."""


class Math(ReferenceReward):
    r"""Give 1 to a response whose last answer equals the right one as mathematics, else 0.

    The answer is read behind the last ``</think>``; a thought that does not end has none. There it is the last
    ``\boxed{...}``, else the last ``<answer>...</answer>``, else the last formula or number. Money, thousands
    separators, units, ``x =`` and text around it do not count, but another unit of length, mass, volume, time or money
    makes another answer. A percentage equals its number and its hundredth. Where the right answer is a set or a list,
    the response's must have the same elements, in any order; of a pair in brackets the order counts. math-verify
    compares.
    """

    confined: ClassVar[bool] = True
    """It builds expressions with ``sympy.parse_expr``, which is ``eval``."""

    step_timeout_s: int = Field(5, ge=1)
    """Seconds that reading a response may take, and comparing it with the right answer."""

    def examine_answer(self, answer: object) -> str | None:
        """As elsewhere, but any finite number is mathematics."""
        if isinstance(answer, float) and isfinite(answer):
            return None
        return super().examine_answer(answer)

    def check_machine(self) -> None:
        """Check that the library is there.

        Raises:
            ConfigError: It is not.
        """
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise ConfigError("math-verify is not installed.", fix="pip install 'anytron[math]'") from error

    def __call__(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Score samples; one that takes too long is a failure of that sample."""
        return [self._score(sample.last_message, self.reference(sample)) for sample in samples]

    def _score(self, response: str, reference: str) -> float | Exception:
        from math_verify.errors import TimeoutException

        if response.rfind("<think>") > response.rfind("</think>"):
            return 0.0  # a thought that was cut off: there is no answer
        given = last_answer(response)
        whole = response.rpartition("</think>")[2]
        right = written(_unwrapped(reference))
        letters = _text(reference)
        if letters and letters in (_text(whole), _text(given or "")):
            return 1.0  # as letters: also what is no mathematics, such as yes
        if given is None:
            return 0.0
        try:
            return float(self._equal(right, written(given)))
        except TimeoutException:
            return TimeoutError(f"math-verify took more than {self.step_timeout_s} s")

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
        """Ask math-verify.

        Raises:
            TimeoutException: It took too long.
        """
        from math_verify import parse, verify

        if right == given:
            return any(letter.isalnum() for letter in right)  # a sign alone is no answer
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


def _unwrapped(reference: str) -> str:
    """The right answer without a sentence or a box around it."""
    if "\\boxed" in reference or "<answer>" in reference:
        return last_answer(reference) or reference
    return reference


def _text(answer: str) -> str:
    """An answer as letters and digits, for comparing what is no mathematics. Commands of LaTeX keep their capitals."""
    plain = WORDED.sub(lambda found: found[1], answer).strip().strip("$").rstrip(".").strip()
    plain = _CHOICE.sub(r"\1", plain)
    return " ".join((plain if "\\" in plain else plain.lower()).split())
