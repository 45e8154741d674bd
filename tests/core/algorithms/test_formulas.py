"""Values and gradients of the policy's losses against the papers' formulas (:mod:`tests.algorithm_oracle`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anytron.algorithms.contract import PolicyTokens
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import LOSSES
from anytron.config.algorithm import AlgorithmSection
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import RaggedBatch, TokenOutputs
from tests import algorithm_oracle

PROMPTS, RESPONSES = [3, 1, 2, 4, 1], [5, 9, 0, 1, 6]
AGGREGATIONS = ["token-mean", "sequence-mean", "token-sum", "length-constant"]
CORRECTIONS = {
    "none": {},
    "measured": {"importance_correction": "measured"},
    "truncated": {"importance_correction": "truncated", "importance_cap": 1.5},
    "masked": {"importance_correction": "masked", "importance_cap": 1.5, "importance_floor": 0.6},
    "truncated sequences": {
        "importance_correction": "truncated",
        "importance_level": "sequence",
        "importance_cap": 0.2,
    },
    "masked sequences": {
        "importance_correction": "masked",
        "importance_level": "sequence",
        "importance_cap": 4.0,
        "importance_floor": 0.25,
    },
}


def drawn_batch(seed=0, holes=False, scale=0.5):
    """Random float64 numbers, with tokens far beyond every bound; some tokens of responses are not the policy's."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(PROMPTS) + torch.tensor(RESPONSES)
    places = torch.cat([torch.arange(int(length)) for length in lengths])
    mask = places >= torch.repeat_interleave(torch.tensor(PROMPTS), lengths)
    total = mask.numel()

    def noise(size):
        return size * torch.randn(total, generator=generator, dtype=torch.float64)

    if holes:
        mask &= torch.rand(total, generator=generator) > 0.3
    current = -2 + noise(0.5)
    batch = RaggedBatch(
        lengths=lengths,
        tokens=torch.arange(total),
        response_mask=mask,
        rollout_log_probs=torch.where(mask, current + noise(scale), 0.0),
        old_log_probs=torch.where(mask, current + noise(scale), 0.0),
        reference_log_probs=current + noise(scale),
        advantages=noise(1.0) * mask,
    )
    return batch, current, 1 + noise(0.1).abs()


def settings_of(**changes):
    """Keys of ``algorithm``; the oracle reads nothing else."""
    return AlgorithmSection(**{"entropy_coefficient": 0.05, "kl_coefficient": 0.2, "clip_high": 0.3, **changes})


def check(batch, log_probs, entropy, algorithm, rel=1e-6):
    plan = UpdatePlan(
        epochs=1,
        count=1,
        aggregation=algorithm.aggregation,
        max_tokens=1000,
        length_constant=algorithm.length_constant or 1,
    )
    (mini_batch,) = plan.mini_batches(batch, seed=0)
    values = [values.clone().requires_grad_() for values in (log_probs, entropy)]
    found = PolicyLoss(algorithm)(TokenOutputs(*values), mini_batch.batch)
    gradients = torch.autograd.grad(found.loss, values)
    wanted = [values.clone().requires_grad_() for values in (log_probs, entropy)]
    expected = algorithm_oracle.policy_loss(batch, *wanted, algorithm.model_dump())
    # Weights are float32: their rounding is the difference.
    assert found.loss.item() == pytest.approx(expected.item(), rel=rel, abs=rel)
    zero = [torch.zeros_like(one) for one in wanted]
    exact = torch.autograd.grad(expected, wanted, allow_unused=True)
    for gradient, right, nothing in zip(gradients, exact, zero, strict=True):
        torch.testing.assert_close(gradient, nothing if right is None else right, rtol=rel, atol=1e-9)
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_is_that_of_its_paper(loss, aggregation, seed):
    algorithm = settings_of(loss=loss, aggregation=aggregation, length_constant=7)
    batch, log_probs, entropy = drawn_batch(seed, holes=seed > 0)
    check(batch, log_probs, entropy, algorithm)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gspo_token"])
def test_dual_clip_is_that_of_its_paper(loss):
    algorithm = settings_of(loss=loss, dual_clip=1.5, kl_coefficient=0.0)
    batch, log_probs, entropy = drawn_batch(4)
    batch = replace(batch, old_log_probs=torch.where(batch.response_mask, log_probs - 0.7, 0.0))  # ratios of 2
    found = check(batch, log_probs, entropy, algorithm)
    plain = check(batch, log_probs, entropy, settings_of(loss=loss, kl_coefficient=0.0))
    assert found.loss < plain.loss
    assert found.metrics["policy/clip_fraction"] > plain.metrics["policy/clip_fraction"]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_a_correction_is_a_constant_factor_of_each_tokens_loss(loss, correction):
    algorithm = settings_of(loss=loss, **CORRECTIONS[correction])
    batch, log_probs, entropy = drawn_batch(5, holes=True)
    found = check(batch, log_probs, entropy, algorithm)
    if "importance_correction" in CORRECTIONS[correction]:
        assert 0 < found.metrics["rollout/importance_clip_fraction"] < 1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_is_the_estimator_chosen(estimator):
    batch, log_probs, entropy = drawn_batch(6)
    found = check(batch, log_probs, entropy, settings_of(kl_estimator=estimator))
    other = check(batch, log_probs, entropy, settings_of(kl_estimator=estimator, kl_placement="reward"))
    assert "policy/kl" in found.metrics
    assert other.metrics["loss/kl"] == 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_where_nothing_has_moved_the_gradient_is_the_policy_gradient(loss):
    batch, log_probs, entropy = drawn_batch(7)
    per_sequence = torch.repeat_interleave(torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0]).double(), batch.lengths)
    batch = replace(batch, old_log_probs=None, advantages=per_sequence * batch.response_mask)
    batch = next(UpdatePlan(1, 1, "sequence-mean", 100).mini_batches(batch, seed=0)).batch
    leaf = log_probs.requires_grad_()
    found = PolicyLoss(AlgorithmSection(loss=loss))(TokenOutputs(leaf, entropy), batch)
    (gradient,) = torch.autograd.grad(found.loss, leaf)
    torch.testing.assert_close(gradient, -batch.loss_weights.double() * batch.advantages, rtol=1e-6, atol=1e-12)


def test_with_one_advantage_per_response_gspo_and_its_token_variant_have_the_same_gradient():
    batch, log_probs, entropy = drawn_batch(8, scale=0.05)
    batch = replace(batch, advantages=torch.repeat_interleave(torch.randn(5).double(), batch.lengths))
    batch = next(UpdatePlan(1, 1, "sequence-mean", 100).mini_batches(batch, seed=0)).batch
    gradients = []
    for loss in ("gspo", "gspo_token"):
        leaf = log_probs.clone().requires_grad_()
        found = PolicyLoss(AlgorithmSection(loss=loss))(TokenOutputs(leaf, entropy), batch)
        gradients += torch.autograd.grad(found.loss, leaf)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-12)
    assert gradients[0].any()


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("distance", [-200.0, 89.0, 200.0])
def test_a_ratio_that_overflows_is_held(loss, advantage, distance):
    """float32's exp is infinite from 88.7 on, and a gradient of 0 times infinity is NaN."""
    response = torch.tensor([False, True, True])
    batch = RaggedBatch(
        lengths=torch.tensor([3]),
        tokens=torch.arange(3),
        response_mask=response,
        rollout_log_probs=torch.tensor([0.0, -1.0 - distance, -1.0]),
        old_log_probs=torch.tensor([0.0, -1.0 - distance, -1.0]),
        reference_log_probs=torch.tensor([0.0, -1.0 + distance, -1.0]),
        advantages=torch.full((3,), advantage),
        loss_weights=response / 2,
        token_shares=response / 2,
    )
    log_probs = torch.full((3,), -1.0, requires_grad=True)
    for level in ("token", "sequence"):
        algorithm = settings_of(loss=loss, importance_correction="masked", importance_level=level)
        found = PolicyLoss(algorithm)(TokenOutputs(log_probs, torch.ones(3)), batch)
        (gradient,) = torch.autograd.grad(found.loss, log_probs)
        assert torch.isfinite(found.loss)
        assert torch.isfinite(gradient).all()
        assert all(value.isfinite() for value in found.metrics.values())


def test_a_sabotaged_loss_is_noticed(monkeypatch):
    """A ratio of the whole micro-batch, where it should be that of each response."""

    def blind(self, values):
        return (torch.where(self.response_mask, values, 0.0).sum() / self.response_mask.sum()).expand(
            self.num_sequences
        )

    monkeypatch.setattr(PolicyTokens, "sequence_mean", blind)
    batch, log_probs, entropy = drawn_batch(0)
    with pytest.raises(AssertionError):
        check(batch, log_probs, entropy, settings_of(loss="gspo"))
