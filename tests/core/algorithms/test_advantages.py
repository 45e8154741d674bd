"""Advantages against loops in plain Python, and their laws."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.algorithms.advantages import (
    STD_EPSILON,
    VARIANCE_EPSILON,
    broadcast_to_tokens,
    grpo,
    place_at_end,
    rloo,
)
from anytron.algorithms.registered import ADVANTAGES, with_advantages
from anytron.config.algorithm import AlgorithmSection
from anytron.sequences.batch import RaggedBatch

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


@settings(deadline=None)
@given(rewards)
def test_rloo_compares_each_reward_with_the_mean_of_the_others(groups):
    found = rloo(torch.tensor(groups, dtype=torch.float64))
    for group, row in zip(groups, found.tolist(), strict=True):
        others = [statistics.fmean(group[:place] + group[place + 1 :]) for place in range(len(group))]
        assert row == pytest.approx([reward - other for reward, other in zip(group, others, strict=True)], abs=1e-9)


def test_rloo_leaves_out_what_is_dropped_and_has_nothing_for_one_alone():
    nan = float("nan")
    found = rloo(torch.tensor([[1.0, nan, 4.0], [nan, 5.0, nan], [2.0, 2.0, 2.0]]))
    assert found.tolist() == [[-3.0, 0.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


LENGTHS = torch.tensor([4, 3, 5, 2, 4, 1])
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0]).bool()
"""Six responses of three prompts; one with a hole, and the last empty."""
REWARDS = [1.0, 0.5, -1.0, 2.0, 0.25, 0.0]


def estimated(advantage, rewards=REWARDS, **settings):
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    batch = RaggedBatch(LENGTHS, torch.arange(19), MASK, groups=groups, **settings.pop("fields", {}))
    return with_advantages(batch, torch.tensor(rewards), AlgorithmSection(advantage=advantage, **settings))


def rows(values):
    """The values of each response's own tokens."""
    lengths = LENGTHS.tolist()
    return [row[mask].tolist() for row, mask in zip(values.split(lengths), MASK.split(lengths), strict=True)]


def whitened(nested):
    flat = [value for row in nested for value in row]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [[(value - mean) / (variance + VARIANCE_EPSILON) ** 0.5 for value in row] for row in nested]


def assert_rows(found, expected):
    assert [len(row) for row in found] == [len(row) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)


def test_a_reward_goes_to_the_last_token_that_was_generated():
    placed = place_at_end(torch.tensor(REWARDS), LENGTHS, MASK)
    assert rows(placed) == [[0, 0, 1.0], [0, 0.5], [0, 0, -1.0], [2.0], [0, 0.25], []]
    assert not placed[~MASK].any()


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_reward_is_at_the_last_own_token_wherever_an_environment_writes(masks):
    mask, lengths = torch.tensor([own for row in masks for own in row]), torch.tensor([len(row) for row in masks])
    wanted = []
    for reward, row in enumerate(masks, start=1):
        last = max((place for place, own in enumerate(row) if own), default=None)
        wanted += [float(reward) if place == last else 0.0 for place in range(len(row))]
    assert place_at_end(torch.arange(1.0, len(masks) + 1), lengths, mask).tolist() == wanted


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_discounted_returns_over_the_step(gamma):
    returns = [
        [reward * gamma**left for left in reversed(range(len(row)))]
        for reward, row in zip(REWARDS, rows(MASK), strict=True)
    ]
    found = estimated("reinforce_plus_plus", gamma=gamma)
    assert_rows(rows(found.advantages), whitened(returns))
    assert not found.advantages[~MASK].any()


def test_its_variant_with_a_baseline_whitens_differences_from_the_groups_mean():
    means = [statistics.fmean(REWARDS[index // 2 * 2 : index // 2 * 2 + 2]) for index in range(6)]
    differences = [[reward - mean] * len(row) for reward, mean, row in zip(REWARDS, means, rows(MASK), strict=True)]
    assert_rows(rows(estimated("reinforce_plus_plus_baseline").advantages), whitened(differences))


def test_dr_grpo_and_rloo_reach_tokens():
    centred = [0.25, -0.25, -1.5, 1.5, 0.125, -0.125]
    for advantage, factor in (("dr_grpo", 1), ("rloo", 2)):
        expected = [[factor * value] * len(row) for value, row in zip(centred, rows(MASK), strict=True)]
        assert_rows(rows(estimated(advantage).advantages), expected)


def test_none_learns_nothing_from_rewards():
    assert not estimated("none").advantages.any()


@pytest.mark.parametrize("advantage", sorted(set(ADVANTAGES) - {"gae", "none"}))
def test_equal_rewards_of_a_group_teach_nothing_where_the_group_is_the_baseline(advantage):
    """The preflight refuses a group of one for exactly these."""
    taught = bool(estimated(advantage, [0.1, 0.1, 0.7, 0.7, 3.3, 3.3]).advantages.any())
    assert taught != AlgorithmSection(advantage=advantage).compares_a_group


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce_plus_plus", "gae"])
def test_a_penalty_in_the_reward_is_taken_from_each_token(advantage, estimator):
    """arXiv:1909.08593, eq. 2: by token for returns and for a critic, in sum for groups."""
    generator = torch.Generator().manual_seed(3)
    old, reference, values = 0.5 * torch.randn(3, 19, generator=generator)
    fields = {"old_log_probs": old * MASK, "reference_log_probs": reference, "values": values}
    found = estimated(
        advantage,
        fields=fields if advantage == "gae" else {**fields, "values": None},
        kl_coefficient=0.3,
        kl_placement="reward",
        kl_estimator=estimator,
        gamma=0.9,
        gae_lambda=0.8,
        normalize_std=False,
    )
    ratio = (reference - old).double()
    kl = {"k1": -ratio, "k2": ratio**2 / 2, "k3": ratio.exp() - 1 - ratio}[estimator]
    per_token = [
        [-0.3 * value + (reward if place == len(row) - 1 else 0.0) for place, value in enumerate(row)]
        for reward, row in zip(REWARDS, rows(kl), strict=True)
    ]
    if advantage == "dr_grpo":
        totals = [sum(row) for row in per_token]
        centred = [total - statistics.fmean(totals[i // 2 * 2 : i // 2 * 2 + 2]) for i, total in enumerate(totals)]
        expected = [[value] * len(row) for value, row in zip(centred, per_token, strict=True)]
    else:
        before = rows(values) if advantage == "gae" else [[0.0] * len(row) for row in per_token]
        decay = 0.9 * 0.8 if advantage == "gae" else 0.9
        expected = []
        for rewarded, expectation in zip(per_token, before, strict=True):
            carried, row = 0.0, []
            for place in reversed(range(len(rewarded))):
                following = expectation[place + 1] if place + 1 < len(rewarded) else 0.0
                carried = rewarded[place] + 0.9 * following - expectation[place] + decay * carried
                row.insert(0, carried)
            expected.append(row)
        expected = expected if advantage == "gae" else whitened(expected)
    assert_rows(rows(found.advantages), expected)
    assert found.token_rewards is None
