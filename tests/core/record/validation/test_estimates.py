"""pass@k against enumeration, intervals against the truth they should hold."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.record import validation
from anytron.record.validation import interval, pass_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_response_that_passes(samples):
    for passed in range(samples + 1):
        responses = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            choices = [any(choice) for choice in combinations(responses, k)]
            assert pass_at_k(samples, passed, k) == pytest.approx(
                float(Fraction(sum(choices), len(choices))), abs=1e-15
            )


@given(st.integers(1, 400), st.data())
def test_pass_at_k_is_the_product_of_the_paper(samples, data):
    # https://arxiv.org/abs/2107.03374, figure 3: the numerically stable form
    passed, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    if samples - passed < k:
        expected = 1.0
    else:
        expected = 1.0 - float(np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))
    assert pass_at_k(samples, passed, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_unbiased_and_the_plug_in_estimate_is_not():
    # Sum over all outcomes of n responses that pass with probability p each: exact, nothing is drawn.
    samples, k, chance = 8, 4, 0.2
    mean, plug_in = 0.0, 0.0
    for passed in range(samples + 1):
        weight = math.comb(samples, passed) * chance**passed * (1 - chance) ** (samples - passed)
        mean += weight * pass_at_k(samples, passed, k)
        plug_in += weight * (1 - (1 - passed / samples) ** k)
    truth = 1 - (1 - chance) ** k
    assert mean == pytest.approx(truth, abs=1e-12)
    assert plug_in < truth - 0.04


def test_an_interval_holds_the_truth_as_often_as_it_says():
    # Prompts differ, and responses of a prompt resemble each other: P prompts with chances of their own, 8 responses.
    generator = np.random.default_rng(0)
    held, naive, trials = 0, 0, 300
    for _ in range(trials):
        chances = generator.beta(0.5, 0.5, size=80)
        means = generator.binomial(8, chances) / 8
        low, high = interval(torch.from_numpy(means))
        held += low <= 0.5 <= high
        p = means.mean()
        naive += abs(p - 0.5) <= 1.96 * math.sqrt(p * (1 - p) / (80 * 8))
    assert 0.91 <= held / trials <= 0.98
    assert naive / trials < 0.75, "responses taken for independent of each other promise too much"


def test_an_interval_is_the_same_each_time_and_leaves_random_numbers_alone():
    values = torch.rand(50, dtype=torch.float64)
    before = torch.random.get_rng_state()
    assert interval(values) == interval(values)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_large_set_is_drawn_in_parts_and_a_small_one_has_no_interval(monkeypatch):
    assert interval(torch.tensor([])) is None
    assert interval(torch.tensor([0.5])) is None
    assert interval(torch.full((9,), 0.25)) == (0.25, 0.25)
    values = torch.arange(500) % 2
    whole = interval(values)
    monkeypatch.setattr(validation, "_DRAWN_AT_ONCE", 1)
    parts = interval(values)
    assert parts == pytest.approx(whole, abs=0.01)
    # The standard error is 0.5 / sqrt(500); the normal approximation is near.
    assert parts == pytest.approx((0.5 - 1.96 * 0.0224, 0.5 + 1.96 * 0.0224), abs=0.005)
