"""The verifiers of the tasks of reasoning-gym (the extra ``reasoning-gym``)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from anytron.base.errors import DataError
from anytron.task.data.reasoning_gym import ENTRY, missing_library
from anytron.task.rewards.patterns import PatternReward, last_captured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.task.rewards.sample import Sample


class ReasoningGym(PatternReward):
    """Give what the task's own verifier gives, mostly from 0 to 1; needs prompts of ``data.source: reasoning_gym``."""

    confined: ClassVar[bool] = True
    """Several of its verifiers call ``eval`` on what the model answered."""

    pattern: str = Field(".+", min_length=1)
    """Where the answer is: the first group of the last match of this regular expression, or the whole match. White
    space around it is ignored."""

    def check_machine(self) -> None:
        """Check that the library is there.

        Raises:
            ConfigError: It is not.
        """
        try:
            import reasoning_gym  # noqa: F401
        except ImportError as error:
            raise missing_library("rewards") from error

    def check_prompt(self, data: Mapping[str, Any]) -> None:
        """Find out before the run whether a prompt is one of reasoning-gym.

        Raises:
            DataError: It is not.
        """
        if data.get(ENTRY) is None:  # of a table that has other prompts, too, the entry is null
            raise DataError(
                "The prompt does not come from reasoning-gym.", fix="start a new run with data.source=reasoning_gym"
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
