"""A reward for mathematics, by the library math-verify (the extra ``math``)."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from anytron.errors import ConfigError
from anytron.rewards.reference import ReferenceReward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.rewards.sample import Sample


class Math(ReferenceReward):
    r"""Give 1 to a response whose last answer equals the right one as mathematics, else 0.

    The answer is the response's ``\boxed{...}``, else another formula or number in it: what math-verify takes.
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
        return [self._score(sample.turns[-1], self.reference(sample)) for sample in samples]

    def _score(self, response: str, reference: str) -> float | Exception:
        from math_verify import parse, verify
        from math_verify.errors import TimeoutException

        formula = reference if "$" in reference or "\\boxed" in reference else f"\\boxed{{{reference}}}"
        try:
            right = parse(formula, parsing_timeout=self.step_timeout_s, raise_on_error=True)
            try:
                given = parse(response, parsing_timeout=self.step_timeout_s, raise_on_error=True)
                return float(verify(right, given, timeout_seconds=self.step_timeout_s, raise_on_error=True))
            except (
                ArithmeticError,
                AttributeError,
                LookupError,
                NotImplementedError,
                RecursionError,
                TypeError,
                ValueError,
            ):
                return 0.0  # no mathematics, as sympy says in many ways
        except TimeoutException:
            return TimeoutError(f"math-verify took more than {self.step_timeout_s} s")
