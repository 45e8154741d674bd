"""Weights of tokens in the loss of a mini-batch."""

from __future__ import annotations

import pytest
import torch

from anytron.algorithms.aggregation import loss_weights, token_shares
from anytron.base.errors import DataError

LENGTHS = torch.tensor([3, 2, 5])
RESPONSE = torch.tensor([False, False, True, False, False, False, True, True, True, True])


def test_token_mean_weighs_tokens_alike():
    weights = loss_weights(LENGTHS, RESPONSE, "token-mean")
    assert weights.tolist() == pytest.approx([0, 0, 0.2, 0, 0, 0, 0.2, 0.2, 0.2, 0.2])


def test_sequence_mean_weighs_sequences_alike_and_empty_responses_not_at_all():
    weights = loss_weights(LENGTHS, RESPONSE, "sequence-mean")
    assert weights.tolist() == pytest.approx([0, 0, 0.5, 0, 0, 0, 0.125, 0.125, 0.125, 0.125])


def test_a_sum_weighs_every_token_1():
    assert torch.equal(loss_weights(LENGTHS, RESPONSE, "token-sum"), RESPONSE.float())


def test_a_constant_divides_the_sum_of_each_sequence_and_empty_ones_count():
    """Dr. GRPO, arXiv:2503.20783, appendix A: the sum over tokens / constant, the mean over all responses."""
    weights = loss_weights(LENGTHS, RESPONSE, "length-constant", length=20)
    torch.testing.assert_close(weights, RESPONSE.float() / (3 * 20))


def test_shares_do_not_depend_on_the_aggregation():
    torch.testing.assert_close(token_shares(RESPONSE), loss_weights(LENGTHS, RESPONSE, "token-mean"))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "token-sum", "length-constant"])
def test_nothing_to_learn_from_is_an_error_not_nan(aggregation):
    nothing = torch.zeros(10, dtype=torch.bool)
    with pytest.raises(DataError, match=r"(?s)every response of the mini-batch is empty.*min_new_tokens"):
        loss_weights(LENGTHS, nothing, aggregation)
    assert token_shares(nothing).tolist() == [0] * 10
