"""A sample that a reward drops: what is learnt is what would be learnt if it had never been drawn."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from anytron.algorithms.advantages.grpo import STD_EPSILON
from anytron.algorithms.advantages.per_token import VARIANCE_EPSILON
from anytron.algorithms.registered import with_advantages
from anytron.batch import RaggedBatch
from anytron.config.schema import AlgorithmSection
from anytron.errors import DataError
from anytron.trainer.updates import UpdatePlan

NAN = float("nan")
GROUP = 3
REWARDS = [1.0, NAN, 3.0, NAN, NAN, NAN, 0.5, 0.25, -1.0, NAN, 2.0, NAN]
KEPT = [index for index, reward in enumerate(REWARDS) if reward == reward]
USER = """
import torch
from anytron.algorithms.contract import Advantages

def centred(batch, rewards, algorithm, group_size):
    assert bool(rewards.isfinite().all()) and len(rewards) == batch.num_sequences
    groups = rewards.view(-1, group_size)
    each = (groups - groups.mean(1, keepdim=True)).flatten()
    per_token = torch.repeat_interleave(each, batch.lengths) * batch.response_mask
    return Advantages(per_token, None if batch.values is None else per_token + 1)
"""


@pytest.fixture
def batch() -> RaggedBatch:
    """Twelve sequences of four prompts; the first token of each is the prompt, and one response is empty."""
    lengths = torch.tensor([3, 2, 4, 2, 5, 3, 2, 1, 4, 3, 2, 6])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    generator = torch.Generator().manual_seed(0)
    total = int(lengths.sum())
    values = torch.randn(total, generator=generator)
    return RaggedBatch(lengths, torch.arange(total), positions > 0, values=values)


def spread(batch: RaggedBatch, values: torch.Tensor) -> torch.Tensor:
    """Bring the values of the kept sequences' tokens to the whole batch."""
    whole = torch.zeros(batch.num_tokens)
    kept = torch.zeros(batch.num_sequences, dtype=torch.bool)
    kept[KEPT] = True
    whole[torch.repeat_interleave(kept, batch.lengths)] = values
    return whole


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_compares_with_the_rest_of_the_group(batch, normalize_std):
    found = with_advantages(
        replace(batch, values=None), torch.tensor(REWARDS), GROUP, AlgorithmSection(normalize_std=normalize_std)
    )
    expected = []
    for start in range(0, len(REWARDS), GROUP):
        rest = [reward for reward in REWARDS[start : start + GROUP] if reward == reward]
        for reward in REWARDS[start : start + GROUP]:
            advantage = 0.0 if reward != reward or len(rest) < 2 else reward - statistics.fmean(rest)
            expected.append(
                advantage / (statistics.stdev(rest) + STD_EPSILON) if advantage and normalize_std else advantage
            )
    per_token = torch.repeat_interleave(torch.tensor(expected), batch.lengths) * batch.response_mask
    torch.testing.assert_close(found.advantages, per_token)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_gae_is_that_of_the_other_samples(batch, normalize_std):
    algorithm = AlgorithmSection(advantage="gae", gamma=0.9, gae_lambda=0.8, normalize_std=normalize_std)
    found = with_advantages(batch, torch.tensor(REWARDS), GROUP, algorithm)
    alone = batch.select(torch.tensor(KEPT))
    expected, returns = [], []
    for index in KEPT:
        start, length = int(batch.lengths[:index].sum()), int(batch.lengths[index])
        values = batch.values[start : start + length].double().tolist()
        carried, row = 0.0, [0.0] * length
        for place in reversed(range(1, length)):
            last = place == length - 1
            delta = (REWARDS[index] if last else 0.9 * values[place + 1]) - values[place]
            carried = row[place] = delta + 0.9 * 0.8 * carried
        expected += row
        returns += [0.0] + [advantage + value for advantage, value in zip(row[1:], values[1:], strict=True)]
    expected = torch.tensor(expected, dtype=torch.float64)
    if normalize_std:
        states = expected[alone.response_mask]
        whitened = (states - states.mean()) / (states.var() + VARIANCE_EPSILON).sqrt()
        expected = torch.zeros_like(expected).masked_scatter(alone.response_mask, whitened)
    torch.testing.assert_close(found.advantages, spread(batch, expected.float()))
    torch.testing.assert_close(found.returns, spread(batch, torch.tensor(returns)))


def test_a_function_of_the_user_is_given_complete_groups(batch, tmp_path):
    (tmp_path / "mine.py").write_text(USER)
    algorithm = AlgorithmSection(advantage=f"{tmp_path}/mine.py:centred")
    found = with_advantages(batch, torch.tensor(REWARDS), GROUP, algorithm)
    third = torch.repeat_interleave(torch.arange(12) // GROUP == 2, batch.lengths)  # the only group without a loss
    assert torch.equal(found.response_mask, batch.response_mask & third)
    mean = statistics.fmean(REWARDS[6:9])
    expected = [reward - mean if index in (6, 7, 8) else 0.0 for index, reward in enumerate(REWARDS)]
    per_token = torch.repeat_interleave(torch.tensor(expected), batch.lengths) * found.response_mask
    torch.testing.assert_close(found.advantages, per_token)
    assert torch.equal(found.returns[~third], torch.zeros(int((~third).sum())))
    with pytest.raises(DataError, match="Every prompt of the step has a sample that was dropped"):
        with_advantages(batch, torch.tensor([NAN, 1.0, 2.0] * 4), GROUP, algorithm)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_updates_weigh_the_other_samples_only_and_leave_out_a_mini_batch_of_none(batch, aggregation):
    found = with_advantages(replace(batch, values=None), torch.tensor(REWARDS), GROUP, AlgorithmSection())
    assert torch.equal(
        found.response_mask, spread(batch, torch.ones(int(batch.lengths[KEPT].sum()))).bool() & batch.response_mask
    )
    plan = UpdatePlan(epochs=2, count=4, group_size=GROUP, aggregation=aggregation, max_tokens=100)
    mini_batches = list(plan.mini_batches(found, seed=0))
    assert len(mini_batches) == 6  # of eight: the second prompt has lost all of its samples
    for mini_batch in mini_batches:
        assert float(mini_batch.loss_weights.sum()) == pytest.approx(1.0)
        assert not mini_batch.loss_weights[~mini_batch.response_mask].any()
        sequence = torch.repeat_interleave(torch.arange(GROUP), mini_batch.lengths)
        per_sequence = torch.zeros(GROUP).index_add_(0, sequence, mini_batch.loss_weights)
        tokens = torch.zeros(GROUP).index_add_(0, sequence, mini_batch.response_mask.float())
        expected = tokens / tokens.sum() if aggregation == "token-mean" else (tokens > 0) / (tokens > 0).sum()
        torch.testing.assert_close(per_sequence, expected.float())
