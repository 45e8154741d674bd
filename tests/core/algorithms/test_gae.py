"""Generalized advantage estimation against loops in float64, and its laws."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.algorithms.advantages import explained_variance, gae, whiten

numbers = st.floats(-10, 10, width=32)
sequences = st.lists(
    st.tuples(numbers, st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=8)), min_size=1, max_size=5
)
"""A reward, and for each token its value and whether it was generated."""
fractions = st.floats(0, 1)


def arguments(drawn):
    tokens = [token for _, tokens in drawn for token in tokens]
    rewards = []
    for reward, row in drawn:
        own = [place for place, (_, generated) in enumerate(row) if generated]
        rewards += [reward if own and place == own[-1] else 0.0 for place in range(len(row))]
    return {
        "token_rewards": torch.tensor(rewards, dtype=torch.float64),
        "values": torch.tensor([value for value, _ in tokens], dtype=torch.float64),
        "lengths": torch.tensor([len(tokens) for _, tokens in drawn]),
        "response_mask": torch.tensor([generated for _, generated in tokens]),
    }


def by_the_sum(drawn, gamma, gae_lambda):
    """Equation 16 itself: the sum over l of (gamma lambda)^l delta_{t+l}, for each token by itself."""
    found = []
    for reward, tokens in drawn:
        values = [value for value, generated in tokens if generated]
        rewards = [0.0] * (len(values) - 1) + [reward]
        following = [*values[1:], 0.0]
        deltas = [r + gamma * after - before for r, after, before in zip(rewards, following, values, strict=False)]
        sums = iter(
            [
                sum((gamma * gae_lambda) ** ahead * delta for ahead, delta in enumerate(deltas[t:]))
                for t in range(len(values))
            ]
        )
        found += [next(sums) if generated else 0.0 for _, generated in tokens]
    return found


@settings(deadline=None)
@given(sequences, fractions, fractions)
def test_advantages_are_those_of_the_paper(drawn, gamma, gae_lambda):
    found = gae(**arguments(drawn), gamma=gamma, gae_lambda=gae_lambda)
    assert found.tolist() == pytest.approx(by_the_sum(drawn, gamma, gae_lambda), abs=1e-9)


@settings(deadline=None)
@given(sequences)
def test_without_discount_the_whole_outcome_is_compared_with_the_value(drawn):
    inputs = arguments(drawn)
    found = gae(**inputs, gamma=1.0, gae_lambda=1.0)
    outcomes = torch.repeat_interleave(torch.tensor([reward for reward, _ in drawn]).double(), inputs["lengths"])
    expected = (outcomes - inputs["values"]) * inputs["response_mask"]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@settings(deadline=None)
@given(sequences, fractions)
def test_values_that_know_the_outcome_leave_no_advantage(drawn, gae_lambda):
    known = [(reward, [(reward, generated) for _, generated in tokens]) for reward, tokens in drawn]
    found = gae(**arguments(known), gamma=1.0, gae_lambda=gae_lambda)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-9, rtol=0)


@settings(deadline=None)
@given(sequences, fractions, fractions)
def test_what_stands_outside_of_responses_has_no_influence(drawn, gamma, gae_lambda):
    inputs = arguments(drawn)
    wild = {**inputs, "values": torch.where(inputs["response_mask"], inputs["values"], torch.inf)}
    found = gae(**wild, gamma=gamma, gae_lambda=gae_lambda)
    assert torch.equal(found, gae(**inputs, gamma=gamma, gae_lambda=gae_lambda))


def test_a_sequence_does_not_see_the_next_one():
    inputs = arguments([(1.0, [(0.0, False), (0.5, True)]), (100.0, [(50.0, True)]), (7.0, [(3.0, False)])])
    assert gae(**inputs, gamma=1.0, gae_lambda=1.0).tolist() == [0, 0.5, 50, 0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-100, 100), st.booleans()), min_size=1, max_size=20))
def test_whitened_advantages_have_mean_0_and_variance_1(drawn):
    advantages = torch.tensor([float(value) for value, _ in drawn], dtype=torch.float64)
    mask = torch.tensor([generated for _, generated in drawn])
    chosen = whiten(advantages, mask)[mask].tolist()
    assert not whiten(advantages, mask)[~mask].any()
    if len({value for value, generated in drawn if generated}) > 1:
        assert statistics.fmean(chosen) == pytest.approx(0, abs=1e-9)
        assert statistics.variance(chosen) == pytest.approx(1, rel=1e-6)
    else:
        assert chosen == pytest.approx([0.0] * len(chosen), abs=1e-9)


def test_a_critic_is_judged_by_the_variance_it_leaves():
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((4,), 5.0), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4), mask) == 0
