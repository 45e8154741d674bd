"""Rewards that compare a response with the right answer, or search it for a pattern."""

from __future__ import annotations

from functools import cache, cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from anytron.base.errors import DataError
from anytron.config.section import Section
from anytron.task.data.reasoning_gym import ENTRY, missing_library

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.task.rewards.sample import Sample


MATCH_S = 1.0
"""Seconds of processor time that a pattern may take for a response.

It takes microseconds unless it backtracks without end."""


class ReferenceReward(Section):
    """A reward that needs the right answer, which is an entry of the prompt's data."""

    key: str = "answer"
    """The entry of the prompt's data that holds the right answer."""

    def check_prompt(self, data: Mapping[str, Any]) -> None:
        """Check before the run that a prompt has a usable right answer.

        Raises:
            DataError: The prompt's data has no entry ``key``, or its value cannot be a right answer.
        """
        if self.key not in data:
            raise DataError(
                f"The prompt's data has no entry {self.key!r}.",
                why=f"the data has these entries: {', '.join(map(repr, data)) or 'none'}",
                fix="set the reward's option 'key', or add the entry to the prompts' data",
            )
        if why := self.examine_answer(data[self.key]):
            raise DataError(
                f"The right answer in the prompt's entry {self.key!r} cannot be read.",
                why=why,
                fix="correct the data or the option 'key' of the reward, or set data.on_bad_answer=drop "
                "(validation.sets[].data.on_bad_answer=drop) to skip such prompts",
            )

    def examine_answer(self, answer: object) -> str | None:
        """Return why a value cannot be a right answer; None if it can. It runs in the driver, without ``eval``."""
        if answer is None:
            return "it is null: an empty cell, or a column that this row does not have"
        if isinstance(answer, str):
            return None if answer.strip() else "it is empty, and every response contains it"
        if isinstance(answer, int) and not isinstance(answer, bool):
            return None
        if isinstance(answer, float) and not isfinite(answer):
            return f"it is {answer}, which is not a number"
        hint = ": a response with 3 does not equal 3.0" if isinstance(answer, float) else ""
        return f"it must be a text or a whole number, but is {type(answer).__name__} {str(answer)[:40]!a}{hint}"

    def reference(self, sample: Sample) -> str:
        """Return the right answer as text, without white space around it."""
        return str(sample.data[self.key]).strip()


class ExactMatch(ReferenceReward):
    """Score 1 for a response that is the right answer, else 0. White space around both is ignored.

    With an environment, the response is the model's last turn. This holds for all rewards in this module.
    """

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(sample.turns[-1].strip() == self.reference(sample)) for sample in samples]


class Contains(ReferenceReward):
    """Score 1 for a response that contains the right answer, else 0."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Score samples."""
        return [float(self.reference(sample) in sample.turns[-1]) for sample in samples]


class PatternReward(Section):
    """A reward that searches responses for a regular expression."""

    pattern: str = Field(min_length=1)
    """The regular expression; ``.`` matches line ends, too."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        import regex

        try:
            regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"not a valid regular expression: {error}") from error
        return pattern

    @cached_property
    def compiled(self) -> Any:
        """The compiled pattern."""
        import regex

        return regex.compile(self.pattern, regex.DOTALL)


class Format(PatternReward):
    """Score 1 for a response that matches the pattern from beginning to end, but for white space around it; else 0.

    If the chat template opens ``<think>`` in the prompt, the tag is added before the response is matched, so that one
    pattern works for all templates. This holds for all rewards with patterns.
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
    """Score 1 for a response in which the pattern's last match captures the right answer, else 0.

    The captured text is what the pattern's first group matches, or the whole match if the pattern has no group.
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
    """Return the text that a pattern of ``regex`` captures in its last match.

    Returns:
        The text of the first group, or of the whole match if the pattern has no group; None if there is no match; a
        TimeoutError if matching takes longer than :data:`MATCH_S`.
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


class ReasoningGym(PatternReward):
    """Return the score of the task's own verifier, mostly 0 to 1; needs prompts of ``data.source: reasoning_gym``."""

    confined: ClassVar[bool] = True
    """The process that scores is confined, because several verifiers call ``eval`` on the model's answer."""

    pattern: str = Field(".+", min_length=1)
    """Regular expression that finds the answer: the first group of its last match, or the whole match if it has no
    group. White space around the answer is ignored."""

    def check_machine(self) -> None:
        """Check that the library is installed.

        Raises:
            ConfigError: The library is not installed.
        """
        try:
            import reasoning_gym  # noqa: F401
        except ImportError as error:
            raise missing_library("rewards") from error

    def check_prompt(self, data: Mapping[str, Any]) -> None:
        """Check before the run that a prompt comes from reasoning-gym.

        Raises:
            DataError: The prompt does not come from reasoning-gym.
        """
        if data.get(ENTRY) is None:  # of a table that has other prompts, too, the entry is null
            raise DataError(
                "The prompt does not come from reasoning-gym, so this reward cannot score it.",
                fix="start a new run with data.source=reasoning_gym, or use another reward",
            )

    def __call__(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """Score samples; a response without an answer gets 0."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float | Exception:
        answer = last_captured(self.compiled, sample.last_message)
        if answer is None or isinstance(answer, Exception):
            return 0.0 if answer is None else answer
        entry = sample.data[ENTRY]
        return float(_scorer(entry["metadata"]["source_dataset"])(answer.strip(), entry))


@cache
def _scorer(task: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
