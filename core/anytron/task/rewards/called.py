"""How rewards of a user are called."""

from __future__ import annotations

from anytron.base.functions import Called, Kind, has
from anytron.task.rewards.sample import Sample

_SAMPLES = f"samples is a list of Sample (for sample in samples: ...), and {has(Sample)}"
_NUMBERS = "a list with one finite number for each sample, in order"

REWARD = Called("A reward function", ("samples",), _SAMPLES, _NUMBERS)
SCORE = Called("A reward's method __call__", ("samples",), _SAMPLES, _NUMBERS, method="__call__")
MADE = Called("A reward's class", given="the entries of rewards[].options are its keyword arguments", gives="an object")
CHECK_PROMPT = Called(
    "A reward's method check_prompt",
    ("data",),
    "data is Prompt.data of one prompt; raise anytron.base.errors.DataError to refuse it",
    method="check_prompt",
    optional=True,
)
CHECK_MACHINE = Called(
    "A reward's method check_machine",
    given="raise anytron.base.errors.ConfigError where the reward cannot work",
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
