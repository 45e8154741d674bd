"""Group-relative advantages."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.algorithms.advantages.grpo import STD_EPSILON, grpo
from anytron.algorithms.advantages.per_token import broadcast_to_tokens

rewards = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(st.floats(-10, 10, width=32), min_size=size, max_size=size), min_size=1, max_size=5)
)


@settings(deadline=None)
@given(rewards)
def test_each_reward_is_compared_with_its_own_group(groups):
    advantages = grpo(torch.tensor(groups, dtype=torch.float64), normalize_std=True)
    for group, row in zip(groups, advantages.tolist(), strict=True):
        mean, deviation = statistics.fmean(group), statistics.stdev(group)
        assert row == pytest.approx([(reward - mean) / (deviation + STD_EPSILON) for reward in group], abs=1e-9)


@settings(deadline=None)
@given(rewards)
def test_without_the_deviation_differences_of_rewards_are_kept(groups):
    values = torch.tensor(groups, dtype=torch.float64)
    advantages = grpo(values, normalize_std=False)
    torch.testing.assert_close(advantages - advantages[:, :1], values - values[:, :1])
    torch.testing.assert_close(advantages.sum(1), torch.zeros(len(groups), dtype=torch.float64), atol=1e-9, rtol=0)


@settings(deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 9), st.booleans())
def test_equal_rewards_have_exactly_no_advantage(reward, size, normalize_std):
    assert torch.equal(grpo(torch.full((1, size), reward), normalize_std), torch.zeros(1, size))


def test_every_response_token_has_its_sequence_s_advantage():
    lengths = torch.tensor([3, 1, 2])
    response = torch.tensor([False, True, True, False, False, True])
    tokens = broadcast_to_tokens(torch.tensor([2.0, 5.0, -1.0]), lengths, response)
    assert tokens.tolist() == [0, 2, 2, 0, 0, -1]
