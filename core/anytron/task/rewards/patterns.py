"""Rewards by regular expression, of the library ``regex``: unlike the standard library's they have a time limit."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from anytron.config.section import Section
from anytron.task.rewards.reference import ReferenceReward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.task.rewards.sample import Sample

MATCH_S = 1.0
"""Seconds of processor time that a pattern may take for a response.

It takes microseconds unless it backtracks without end."""


class PatternReward(Section):
    """A reward that looks for a pattern."""

    pattern: str = Field(min_length=1)
    """The regular expression; ``.`` matches line ends, too."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        import regex

        try:
            regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return pattern

    @cached_property
    def compiled(self) -> Any:
        """The pattern as the library has it."""
        import regex

        return regex.compile(self.pattern, regex.DOTALL)


class Format(PatternReward):
    """Give 1 to a response that matches the pattern from beginning to end, but for white space around it; else 0.

    Where the chat template opens ``<think>`` in the prompt, the response is looked at with it, so that one pattern does
    for all templates; so in all rewards with patterns.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Score samples; a pattern that takes too long is a failure of that sample."""
        return [self._score(sample.last_message.strip()) for sample in samples]

    def _score(self, text: str) -> float | Exception:
        try:
            return float(self.compiled.fullmatch(text, timeout=MATCH_S) is not None)
        except TimeoutError:
            return _endless()


class Regex(PatternReward, ReferenceReward):
    """Find the pattern's last match in a response, and give 1 if what it captured is the right answer, else 0.

    What is captured is the pattern's first group, or the whole match if it has none.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Score samples; a pattern that takes too long is a failure of that sample."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float | Exception:
        found = last_captured(self.compiled, sample.last_message)
        if isinstance(found, Exception):
            return found
        return float(found is not None and found.strip() == self.reference(sample))


def last_captured(pattern: Any, text: str) -> str | Exception | None:
    """Find what a pattern of ``regex`` captures where it matches last: its first group, or all if it has none.

    Returns:
        The text; None if there is no match; an error if it takes too long.
    """
    last = None
    try:
        for match in pattern.finditer(text, timeout=MATCH_S):
            last = match
    except TimeoutError:
        return _endless()
    return None if last is None else (last[1] if pattern.groups else last[0]) or ""


def _endless() -> TimeoutError:
    return TimeoutError(
        f"the pattern took more than {MATCH_S:g} s of processor time for this response: "
        "it backtracks; make it less ambiguous"
    )
