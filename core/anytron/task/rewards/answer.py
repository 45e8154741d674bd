"""Call a reward function, and represent its result as plain numbers and texts."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from anytron.base.functions import Called, Kind, has, is_async
from anytron.task.isolation.failure import Failure as IsolationFailure
from anytron.task.isolation.failure import read
from anytron.task.rewards.sample import Sample

_SAMPLES = f"samples is a list of Sample (for sample in samples: ...), and {has(Sample)}"
_NUMBERS = "a list with one finite number for each sample, in order"

RewardFunction = Callable[..., Sequence[float | Exception]]
"""A function ``(samples, **options)`` that returns for each sample a finite number, or an exception that says why the
sample has no reward.

It may also be a class: instances are made with the options, and called with the samples."""

REWARD = Called("A reward function", ("samples",), _SAMPLES, _NUMBERS)
SCORE = Called("A reward's method __call__", ("samples",), _SAMPLES, _NUMBERS, method="__call__")
MADE = Called("A reward's class", given="the entries of rewards[].options are its keyword arguments", gives="an object")
CHECK_PROMPT = Called(
    "A reward's method check_prompt",
    ("data",),
    "data is Prompt.data of one prompt; raise anytron.DataError to refuse it",
    method="check_prompt",
    optional=True,
)
CHECK_MACHINE = Called(
    "A reward's method check_machine",
    given="raise anytron.ConfigError where the reward cannot work",
    method="check_machine",
    optional=True,
)
RIGHT_ANSWER = Called(
    "A reward's method right_answer",
    ("data",),
    "data is Prompt.data of one prompt",
    "a response that must get the highest reward, or None",
    method="right_answer",
    optional=True,
)
METHODS = (SCORE, CHECK_PROMPT, CHECK_MACHINE, RIGHT_ANSWER)
REWARDS_FUNCTION = Kind("rewards[].function", REWARD, METHODS, MADE, options=True)

LARGEST = 1e15
"""Largest absolute value of a reward. The standard deviation of rewards and a critic's loss add squares of rewards in
float32, whose largest number is 3.4e38: it has room for a hundred million squares of 1e15."""


@dataclass(frozen=True)
class Failure(IsolationFailure):
    """Why a call has no usable reward.

    Attributes:
        sample: Position of the failing sample in the call; None if unknown.
    """

    sample: int | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of a function to one call.

    Attributes:
        values: One number for each sample, None for the samples in ``failures``. If the call as a whole failed, it is
            empty, and ``failures`` has one entry.
        failures: Failures of samples, in the samples' order.
    """

    values: list[float | None]
    failures: list[Failure]

    @property
    def whole(self) -> bool:
        """Whether the call as a whole succeeded, even if single samples failed."""
        return bool(self.values)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: object, samples: int) -> Answer:
        """Check and read an answer from a process that runs a user's code and may have written anything.

        Args:
            record: The answer.
            samples: Number of samples in the call.

        Raises:
            ValueError: ``record`` is not an answer to a call with this number of samples.
        """
        found = read(cls, record)
        missing = [position for position, value in enumerate(found.values) if value is None]
        places = [failure.sample for failure in found.failures]
        if found.values and (len(found.values) != samples or places != missing):
            raise ValueError(f"{len(found.values)} values, and failures of {places}, for {samples} samples")
        if not found.values and (len(places) != 1 or places[0] not in (None, *range(samples))):
            raise ValueError(f"no values, and failures of {places}, for {samples} samples")
        if not all(value is None or abs(value) <= LARGEST for value in found.values):
            raise ValueError(f"values that are not finite, or beyond {LARGEST:g}")
        return found

    @classmethod
    def failed(cls, failure: Failure) -> Answer:
        """Make the answer to a call that failed as a whole."""
        return cls([], [failure])


def answer(function: RewardFunction, samples: Sequence[Sample]) -> Answer:
    """Call the function with all samples and check what it returns. Even ``exit()`` results in an answer."""
    try:
        scores = function(samples)
        if isinstance(scores, Iterator):
            scores = list(scores)  # a generator raises only when it is read
    except BaseException as error:  # noqa: BLE001 - the function is the user's
        failure = Failure.raised(error, REWARD, function, "rewards[]")
        return Answer.failed(Failure(**vars(failure) | {"sample": culprit(error, samples)}))
    if fault := REWARD.returned_async(function, scores):
        return Answer.failed(Failure(*fault))
    try:
        # Users return tensors and arrays as well as lists.
        values: list[Any] = scores.tolist() if hasattr(scores, "tolist") else list(scores)
    except TypeError:
        fault = REWARD.unusable(function, f"{type(scores).__name__}", "A reward function returned no list.")
        return Answer.failed(Failure(*fault))
    if len(values) != len(samples):
        what = "A reward function returned the wrong number of rewards."
        fault = REWARD.unusable(function, f"{len(values)} rewards for {len(samples)} samples", what)
        return Answer.failed(Failure(*fault))
    found = [_unusable(value, position, function) for position, value in enumerate(values)]
    return Answer(
        [float(value) if failure is None else None for value, failure in zip(values, found, strict=True)],
        [failure for failure in found if failure is not None],
    )


def _unusable(value: object, position: int, function: RewardFunction) -> Failure | None:
    if isinstance(value, Exception):
        why = f"{type(value).__name__}: {value}"
        return Failure(
            "A reward function has no reward for a sample.",
            why,
            "correct the problem that the exception names",
            sample=position,
        )
    if not isinstance(value, Real):
        shown = "a coroutine, which is never awaited," if is_async(value) else repr(value)
        fault = REWARD.unusable(function, f"{shown} for a sample", "A reward is not a number.")
        return Failure(*fault, sample=position)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = -math.inf if value < 0 else math.inf
    if abs(number) <= LARGEST:
        return None
    returned = (
        f"{number:g} for a sample, but rewards must be finite and between -{LARGEST:g} and {LARGEST:g}: otherwise "
        "sums of their squares overflow float32, and every weight of the model becomes NaN"
    )
    return Failure(*REWARD.unusable(function, returned, f"A reward is {number:g}."), sample=position)


def culprit(error: BaseException, samples: Sequence[Sample]) -> int | None:
    """Find the position of the sample that a function was scoring when it raised.

    It is the sample among the local variables of a frame, the innermost one that has a sample; None if no frame has.
    """
    known = {id(sample): position for position, sample in enumerate(list(samples))}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if id(value) in known:
                return known[id(value)]
    return None
