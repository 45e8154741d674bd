"""What stands as right answer in a prompt's data: read, or refused with its reason, and never made up."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.config.scoring import RewardSection
from anytron.data.prompts import TokenizedPrompt
from anytron.errors import DataError
from anytron.rewards import Sample
from anytron.rewards.answer import answer
from anytron.rewards.reference import plain_text
from anytron.rewards.registered import REWARDS
from anytron.rewards.scoring import RewardSum

OPTIONS = {
    "exact_match": {},
    "contains": {},
    "regex": {"pattern": "(?s).+"},
    "math": {},
    "judge": {"url": "http://localhost:1", "model": "m", "key": "answer"},
}
"""The rewards that compare with a right answer."""
READABLE = [
    ("3", "3"),
    (" 3\n", "3"),
    (3, "3"),
    (3.0, "3"),
    (-0.0, "0"),
    (0.5, "0.5"),
    (1e6, "1000000"),
    (1e22, "1" + "0" * 22),
    (1e-7, "0.0000001"),
    (np.int64(7), "7"),
    (np.float32(0.1), "0.1"),
    (Decimal("18.50"), "18.5"),
    (Decimal(12345678901234567890123456789012345678), "12345678901234567890123456789012345678"),
]
UNREADABLE = [
    (None, "is null"),
    ("", "is an empty text"),
    (" \n", "is an empty text"),
    (True, "is bool: True"),
    (float("nan"), "is float: nan"),
    (float("inf"), "is float: inf"),
    (["3"], r"is list: \['3'\]"),
    ({"value": 3}, "is dict"),
    (Fraction(1, 3), "is Fraction"),
    (b"3", "is bytes"),
]


def prompt(data, name="line 7"):
    return TokenizedPrompt(name, "?", (1,), data)


def sample(response, data):
    return Sample("p", "?", response, (1,), (1,), (-0.1,), finished=True, data=data)


def rewards_of(*names):
    return RewardSum.from_config([RewardSection(function=name, options=OPTIONS[name]) for name in names])


@pytest.mark.parametrize(("value", "text"), READABLE)
def test_a_text_or_a_number_is_the_right_answer(value, text):
    rewards = rewards_of(*OPTIONS)
    assert list(rewards.objections([prompt({"answer": value})])) == []
    for name, reward in rewards.made.items():
        assert REWARDS[name](**OPTIONS[name]).right_answer({"answer": value}) == text
        if name not in ("judge", "math"):  # one needs a server, the other its process
            assert reward([sample(text, {"answer": value})]) == [1.0]


@pytest.mark.parametrize(("value", "why"), UNREADABLE)
def test_anything_else_is_refused_by_every_reward_and_never_becomes_text(value, why):
    found = list(rewards_of(*OPTIONS).objections([prompt({"answer": value}), prompt({"answer": "3"})]))
    assert [one.reward for one in found] == list(OPTIONS)
    for index, one in enumerate(found):
        with pytest.raises(DataError, match=f"(?s)cannot be read.*line 7, for rewards.{index}.*'answer' {why}"):
            raise one.error
    for name in ("exact_match", "contains", "regex"):
        reward = rewards_of(name).made[name]
        for response in ("", "None", str(value)):
            assert not any(answer(reward, [sample(response, {"answer": value})]).values)


def test_the_first_objection_ends_the_preparation_and_all_of_them_can_be_counted():
    rewards = rewards_of("exact_match", "contains")
    rows = [prompt({"answer": value}, f"line {line}") for line, value in enumerate(["4", None, "5", ""], start=1)]
    assert [(one.reward, one.prompt.id) for one in rewards.objections(rows)] == [
        ("exact_match", "line 2"),
        ("contains", "line 2"),
        ("exact_match", "line 4"),
        ("contains", "line 4"),
    ]
    with pytest.raises(DataError, match="line 2"):
        rewards.check([rows])
    with pytest.raises(DataError, match=r"(?s)no entry 'answer'.*its data has 'id'.*option key"):
        rewards.check([[prompt({"id": "x"})]])


@given(st.one_of(st.integers(-(10**300), 10**300), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_number_is_written_with_its_own_digits(number):
    """Exactly the number, without exponent, and no zeros that say nothing."""
    text = plain_text(number)
    assert text is not None
    assert type(number)(Decimal(text)) == number
    assert set(text) <= set("-.0123456789")
    assert not ("." in text and text.endswith(("0", ".")))
    assert plain_text(json.loads(json.dumps(number))) == text


TESTS_WITHOUT_USE = [
    [{"input": None, "output": "4"}],
    [{"input": "2", "output": None}],
    [{"input": "2", "output": ["4"]}],
    [{"input": "2", "output": ""}, {"input": "3", "output": " \n"}],
    ["assert double(2) == 4", " "],
    "",
]


@pytest.mark.parametrize("tests", TESTS_WITHOUT_USE)
def test_tests_of_programs_are_text_and_want_something(tests):
    with pytest.raises(DataError, match=r"no tests in its entry 'tests'"):
        REWARDS["code"]().check_prompt({"tests": tests})


def test_tests_of_programs_may_be_numbers_and_some_may_want_nothing():
    REWARDS["code"]().check_prompt({"tests": [{"input": 2, "output": 4.0}, {"input": "", "output": ""}]})
    assert REWARDS["code"]().right_answer({"solution": "print(1)"}) == "print(1)"
    assert REWARDS["code"](solution="reference").right_answer({"solution": "print(1)"}) is None


@pytest.mark.parametrize("entry", [None, "countdown", {}, {"metadata": None}])
def test_a_prompt_without_a_task_of_reasoning_gym_is_refused(entry):
    with pytest.raises(DataError, match=r"not a task of reasoning-gym"):
        REWARDS["reasoning_gym"]().check_prompt({"reasoning_gym": entry})


def test_a_right_answer_that_math_cannot_read_is_a_failure_and_no_zero():
    """A response cannot earn anything then: 0 would say that it is wrong."""
    given = answer(REWARDS["math"](), [sample("\\boxed{4}", {"answer": text}) for text in ("\\$18", "4")])
    assert given.values == [None, 1.0]
    (failure,) = given.failures
    assert (failure.what, failure.sample) == ("The right answer cannot be read as mathematics.", 0)
    assert "$18" in failure.why
