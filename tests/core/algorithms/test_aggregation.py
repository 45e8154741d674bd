"""Weights of tokens in the loss of a mini-batch."""

from __future__ import annotations

import pytest
import torch

from anytron.algorithms.aggregation import loss_weights, token_share
from anytron.base.errors import DataError

COUNTS = torch.tensor([1, 0, 4])


def test_token_mean_weighs_tokens_alike():
    assert loss_weights(COUNTS, "token-mean").tolist() == pytest.approx([0.2, 0.2, 0.2])


def test_sequence_mean_weighs_sequences_alike_and_empty_responses_not_at_all():
    first, _, third = loss_weights(COUNTS, "sequence-mean").tolist()
    assert (first, third) == (0.5, 0.125)


def test_a_sum_weighs_every_token_1():
    assert loss_weights(COUNTS, "token-sum").tolist() == [1, 1, 1]


def test_a_constant_divides_the_sum_of_each_sequence_and_empty_ones_count():
    """Dr. GRPO, arXiv:2503.20783, appendix A: the sum over tokens / constant, the mean over all responses."""
    weights = loss_weights(COUNTS, "length-constant", length=20)
    torch.testing.assert_close(weights, torch.full((3,), 1 / (3 * 20)))


def test_shares_do_not_depend_on_the_aggregation():
    assert token_share(COUNTS) == loss_weights(COUNTS, "token-mean")[0]


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "token-sum", "length-constant"])
def test_nothing_to_learn_from_is_an_error_not_nan(aggregation):
    nothing = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(DataError, match=r"(?s)every response of the mini-batch is empty.*min_new_tokens"):
        loss_weights(nothing, aggregation)
    assert token_share(nothing) == 1
