"""What is better, and for how long nothing was."""

from __future__ import annotations

import math

import pytest

from anytron.record.validation import Standing, is_better, standing


def after(values, direction="max", min_delta=0.0):
    return standing([(10 * place, value) for place, value in enumerate(values, start=1)], direction, min_delta)


def test_the_best_is_the_first_of_equals_and_validations_since_are_counted():
    assert after([]) == Standing()
    assert after([0.1, 0.5, 0.4, 0.5]) == Standing(20, 0.5, 2)
    assert after([3.0, 2.0, 2.5], "min") == Standing(20, 2.0, 1)


def test_small_steps_count_together_once_they_are_more_than_the_least():
    assert after([0.50, 0.53, 0.56], min_delta=0.05) == Standing(30, 0.56, 0)
    assert after([0.50, 0.53, 0.55], min_delta=0.05).waited == 2
    assert after([0.50, 0.46, 0.44], "min", 0.05) == Standing(30, 0.44, 0)


def test_what_is_not_a_number_is_never_better_and_anything_is_better_than_that():
    assert after([math.nan, math.nan]) == Standing(None, None, 2)
    assert after([math.nan, -5.0, math.nan]) == Standing(20, -5.0, 1)
    assert after([0.5, math.nan, 0.6]) == Standing(30, 0.6, 0)


@pytest.mark.parametrize(("direction", "worst"), [("max", -math.inf), ("min", math.inf)])
def test_every_number_is_better_than_none(direction, worst):
    assert is_better(worst, None, direction)
    assert not is_better(math.nan, None, direction)
    assert not is_better(worst, 0.0, direction)
