"""Rewards by regular expression: what counts, and what a pattern that backtracks without end costs."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from anytron.task.rewards import Sample
from anytron.task.rewards.matching import Format, Regex


def sample(response: str, answer: str = "42") -> Sample:
    return Sample("p", "?", response, (1,), (1,), (-0.1,), finished=True, data={"answer": answer})


THINKING = r"<think>.*?</think>\s*<answer>.*?</answer>"


def test_a_format_is_of_the_whole_response():
    responses = [
        "<think>a\nb</think>\n<answer>42</answer>\n",
        "so <think>a</think><answer>42</answer>",
        "<answer>42</answer>",
        "",
    ]
    assert Format(pattern=THINKING)([sample(one) for one in responses]) == [1.0, 0.0, 0.0, 0.0]


def test_the_last_match_counts_and_of_it_the_first_group():
    reward = Regex(pattern=r"#### *(-?[\d,]+)( units)?")
    responses = ["#### 41\n#### 42", "#### 42\n#### 41", "#### 42 units", "42", "####", "#### 4"]
    assert reward([sample(one) for one in responses]) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert Regex(pattern=r"\d+")([sample("41, no: 42"), sample("42, no: 41")]) == [1.0, 0.0]


def test_a_group_that_takes_no_part_is_no_answer():
    assert Regex(pattern="(a)?42")([sample("42"), sample("42", "")]) == [0.0, 1.0]


@pytest.mark.parametrize("make", [Format, Regex])
def test_a_pattern_that_backtracks_costs_its_sample_a_second(make):
    began = time.process_time()
    hostile, plain = make(pattern=r"(?:a|aa)+$")([sample("a" * 60 + "!"), sample("aaa", "aaa")])
    assert time.process_time() - began < 10
    assert isinstance(hostile, TimeoutError)
    assert plain == 1.0


@pytest.mark.parametrize("pattern", ["(", "", "(?P<x>a)(?P<x>b", "*a"])
def test_a_pattern_that_is_none_is_refused(pattern):
    with pytest.raises(ValidationError, match=r"not a valid regular expression|at least 1 character"):
        Regex(pattern=pattern)
