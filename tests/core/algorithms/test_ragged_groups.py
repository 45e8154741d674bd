"""Groups of different sizes: what is not learnt from is in nobody's mean, as if it had never been drawn."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.algorithms import advantages as module
from anytron.algorithms.advantages import STD_EPSILON, VARIANCE_EPSILON, by_group, compare, have_signal
from anytron.algorithms.registered import with_advantages
from anytron.base.errors import DataError
from anytron.config.algorithm import AlgorithmSection
from anytron.sequences.batch import RaggedBatch

LENGTHS = [3, 2, 4, 2, 5, 3, 2, 1, 4]
GROUPS = [0, 0, 2, 2, 2, 2, 5, 6, 6]
"""Groups of 2, 4, 1 and 2; those with the numbers between have lost all of their samples."""
REWARDS = [1.0, 3.0, 0.5, 0.25, -1.0, 0.1, 7.0, 0.3, 0.3]
BY_GROUP = [[1.0, 3.0], [0.5, 0.25, -1.0, 0.1], [7.0], [0.3, 0.3]]


@pytest.fixture
def batch():
    """Nine sequences; the first token of each is the prompt, and one response is empty."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    total = sum(LENGTHS)
    return RaggedBatch(torch.tensor(LENGTHS), torch.arange(total), positions > 0, groups=torch.tensor(GROUPS))


def grpo(group):
    return [value / (statistics.stdev(group) + STD_EPSILON) if value else 0.0 for value in dr_grpo(group)]


def dr_grpo(group):
    return [reward - statistics.fmean(group) if len(set(group)) > 1 else 0.0 for reward in group]


def rloo(group):
    others = [group[:place] + group[place + 1 :] for place in range(len(group))]
    return [reward - statistics.fmean(rest or [reward]) for reward, rest in zip(group, others, strict=True)]


ORACLES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def check(batch, advantage):
    """Compare an estimator with its formula, group by group in plain Python."""
    found = with_advantages(batch, torch.tensor(REWARDS), AlgorithmSection(advantage=advantage)).advantages
    oracle = ORACLES[advantage.removeprefix("reinforce_plus_plus_").replace("baseline", "dr_grpo")]
    each = [value for group in BY_GROUP for value in oracle(group)]
    tokens = [[value] * (length - 1) for value, length in zip(each, LENGTHS, strict=True)]
    if advantage == "reinforce_plus_plus_baseline":
        flat = [value for row in tokens for value in row]
        mean, deviation = statistics.fmean(flat), (statistics.variance(flat) + VARIANCE_EPSILON) ** 0.5
        tokens = [[(value - mean) / deviation for value in row] for row in tokens]
    expected = [value for row in tokens for value in [0.0, *row]]
    torch.testing.assert_close(found, torch.tensor(expected))


GROUPED = [*ORACLES, "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("advantage", GROUPED)
def test_each_response_is_compared_with_those_of_its_own_prompt(batch, advantage):
    check(batch, advantage)


@pytest.mark.parametrize("advantage", GROUPED)
@pytest.mark.parametrize(
    "sabotage",
    [
        ("group_sizes", lambda groups: [3, 3, 3]),
        ("group_sizes", lambda groups: [len(groups)]),
        ("by_group", lambda values, groups: by_group(values, groups).nan_to_num(0.0)),
    ],
    ids=["equal-sizes", "one-group", "padding-that-counts"],
)
def test_an_estimator_that_gets_groups_wrong_is_noticed(batch, advantage, sabotage, monkeypatch):
    monkeypatch.setattr(module, *sabotage)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check(batch, advantage)


def test_a_group_of_one_teaches_nothing_and_is_never_nan(batch):
    alone = batch.select(torch.tensor([6]))
    for advantage in GROUPED:
        found = with_advantages(alone, torch.tensor([7.0]), AlgorithmSection(advantage=advantage))
        assert torch.equal(found.advantages, torch.zeros(2))


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_group_is_estimated_as_if_it_were_alone(batch, advantage):
    algorithm = AlgorithmSection(advantage=advantage)
    whole = with_advantages(batch, torch.tensor(REWARDS), algorithm)
    for number in (0, 2, 5, 6):
        own = (batch.groups == number).nonzero().flatten()
        alone = with_advantages(batch.select(own), torch.tensor(REWARDS)[own], algorithm)
        torch.testing.assert_close(alone.advantages, whole.select(own).advantages)


def test_a_comparison_without_groups_is_refused(batch):
    with pytest.raises(DataError, match="field groups is missing"):
        with_advantages(
            RaggedBatch(batch.lengths, batch.tokens, batch.response_mask), torch.ones(9), AlgorithmSection()
        )


def test_a_selection_keeps_the_groups_of_its_sequences(batch):
    chosen = batch.select(torch.tensor([8, 0, 4]))
    assert chosen.groups.tolist() == [6, 0, 2]
    assert chosen.to(torch.device("cpu")).groups is chosen.groups


RAGGED = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.1, 1.0, float("nan")]), min_size=1, max_size=5), min_size=1)


@settings(deadline=None)
@given(RAGGED)
def test_groups_with_signal_are_those_with_two_different_rewards(rewards):
    numbers = [number for number, group in enumerate(rewards) for _ in group]
    found = have_signal(torch.tensor([one for group in rewards for one in group]), torch.tensor(numbers))
    expected = []
    for group in rewards:
        differ = False
        for one in group:
            for other in group:
                differ = differ or one < other
        expected += [differ] * len(group)
    assert found.tolist() == expected


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=5), min_size=1), st.integers(1, 3))
def test_samples_come_back_to_their_places(rewards, gap):
    values = torch.tensor([one for group in rewards for one in group])
    numbers = torch.tensor([number * gap for number, group in enumerate(rewards) for _ in group])
    assert torch.equal(compare(values, numbers, lambda rows: rows), values)
    rows = by_group(values, numbers)
    assert [row[~row.isnan()].tolist() for row in rows] == [torch.tensor(group).tolist() for group in rewards]
