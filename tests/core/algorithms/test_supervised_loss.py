"""The loss of supervised fine-tuning against torch's cross-entropy in float64."""

from __future__ import annotations

import pytest
import torch

from anytron.algorithms.losses import SupervisedLoss
from anytron.base.errors import DataError
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import RaggedBatch, TokenOutputs

LENGTHS = [5, 3, 7, 4]
VOCABULARY = 11


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(LENGTHS)
    mask = torch.rand(sum(LENGTHS), generator=generator) < 0.6
    mask[torch.cumsum(lengths, 0) - lengths] = False
    mask[torch.cumsum(lengths, 0) - 1] = True
    return RaggedBatch(lengths, torch.randint(VOCABULARY, mask.shape, generator=generator), mask)


@pytest.fixture
def logits():
    return torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(5)).requires_grad_()


def outputs(logits, batch):
    """What an engine computes: entry t from the logits after the token before it."""
    before = torch.cat([logits[:1], logits[:-1]])
    full = before.log_softmax(-1)
    log_probs = full.gather(1, batch.tokens[:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    return TokenOutputs(log_probs=log_probs, entropy=entropy)


def oracle(logits, batch, aggregation, constant):
    """By torch's own cross-entropy, float64, sequence by sequence."""
    sums, counts = [], []
    for rows, tokens, mask in zip(
        *(values.split(LENGTHS) for values in (logits.double(), batch.tokens, batch.response_mask)), strict=True
    ):
        labels = tokens.where(mask, -100)
        sums.append(torch.nn.functional.cross_entropy(rows[:-1], labels[1:], ignore_index=-100, reduction="sum"))
        counts.append(int(mask[1:].sum()))
    sums, counts = torch.stack(sums), torch.tensor(counts)
    return {
        "token-mean": sums.sum() / counts.sum(),
        "token-sum": sums.sum(),
        "sequence-mean": (sums / counts).mean(),
        "length-constant": sums.sum() / (len(LENGTHS) * constant),
    }[aggregation]


@pytest.mark.parametrize("aggregation", ["token-mean", "token-sum", "sequence-mean", "length-constant"])
@pytest.mark.parametrize("max_tokens", [1000, 8])
def test_value_and_gradient_are_those_of_cross_entropy(batch, logits, aggregation, max_tokens):
    plan = UpdatePlan(1, 1, aggregation, max_tokens, length_constant=6)
    (mini_batch,) = plan.mini_batches(batch, seed=0)
    wanted = oracle(logits, batch, aggregation, 6)
    (right,) = torch.autograd.grad(wanted, logits)
    whole = outputs(logits, batch)
    total, nll, starts = 0.0, 0.0, torch.cumsum(batch.lengths, 0) - batch.lengths
    parts = plan.micro_batches(mini_batch, 1)[0]
    assert (len(parts) > 1) == (max_tokens == 8)
    for part in parts:
        index = torch.cat([torch.arange(LENGTHS[one]) + starts[one] for one in part.sequences])
        found = SupervisedLoss()(TokenOutputs(whole.log_probs[index], whole.entropy[index]), part.batch)
        assert found.metrics["loss/total"] == found.loss.detach()
        total, nll = total + found.loss, nll + found.metrics["loss/nll"].item()
    (gradient,) = torch.autograd.grad(total, logits)
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert torch.allclose(gradient, right, rtol=1e-4, atol=1e-6)
    assert nll == pytest.approx(oracle(logits, batch, "token-mean", 1).item(), rel=1e-5)


def test_numbers_outside_of_responses_do_not_matter(batch, logits):
    (mini_batch,) = UpdatePlan(1, 1, "token-mean", 1000).mini_batches(batch, seed=0)
    found = outputs(logits, batch)
    spoilt = TokenOutputs(*(one.where(batch.response_mask, torch.inf) for one in (found.log_probs, found.entropy)))
    assert SupervisedLoss()(spoilt, mini_batch.batch).loss == SupervisedLoss()(found, mini_batch.batch).loss


def test_a_field_that_is_missing_is_named(batch, logits):
    with pytest.raises(DataError, match=r"(?s)field loss_weights is missing.*SupervisedLoss"):
        SupervisedLoss()(outputs(logits, batch), batch)
