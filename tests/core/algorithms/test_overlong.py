"""Soft overlong punishment against equation 13 of DAPO, in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.algorithms.advantages import overlong_penalties


def by_the_paper(length: int, longest: int, cache: int) -> Fraction:
    if length <= longest - cache:
        return Fraction(0)
    if length <= longest:
        return Fraction((longest - cache) - length, cache)
    return Fraction(-1)


def check(penalties, longest, buffer):
    lengths = torch.arange(longest + 3)
    expected = [float(by_the_paper(length, longest, buffer)) for length in lengths.tolist()]
    found = penalties(lengths, longest, buffer)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@settings(deadline=None)
@given(st.integers(1, 400).flatmap(lambda longest: st.tuples(st.just(longest), st.integers(1, longest))))
def test_it_is_the_formula_of_the_paper(sizes):
    check(overlong_penalties, *sizes)


def test_the_papers_own_numbers():
    lengths = torch.tensor([1, 16384, 16385, 18432, 20480])
    assert overlong_penalties(lengths, 20480, 4096).tolist() == [0.0, 0.0, -1 / 4096, -0.5, -1.0]


@pytest.mark.parametrize(
    "mutant",
    [
        lambda lengths, longest, buffer: overlong_penalties(lengths + 1, longest, buffer),
        lambda lengths, longest, buffer: -overlong_penalties(lengths, longest, buffer),
        lambda lengths, longest, buffer: overlong_penalties(lengths, longest, buffer + 1),
        lambda lengths, longest, buffer: ((longest - buffer - lengths) / buffer).clamp(max=0.0),
        lambda lengths, longest, buffer: torch.where(lengths < longest, 0.0, -1.0),
    ],
    ids=["one-token-early", "rewarded", "longer-buffer", "without-end", "a-cliff"],
)
def test_other_formulas_are_noticed(mutant):
    with pytest.raises(AssertionError):
        check(mutant, 20, 6)
