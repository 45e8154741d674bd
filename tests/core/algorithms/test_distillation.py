"""On-policy distillation: over all responses, the gradient is that of the reverse KL divergence, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anytron.algorithms import kl
from anytron.algorithms.kl import reverse_kl, teacher_metrics, with_distillation
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import with_advantages
from anytron.base.errors import DataError
from anytron.config.algorithm import AlgorithmSection
from anytron.sequences.batch import RaggedBatch, TokenOutputs

PURE = AlgorithmSection(advantage="none", distillation_coefficient=1.0)
SIZE = 5
"""Entries of the vocabulary."""
LENGTHS = torch.tensor([3, 4, 2, 3])
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1]).bool()
REWARDS = torch.tensor([1.0, 0.0, 0.25, 0.75])
GROUPS = torch.tensor([0, 0, 1, 1])


def recorded(**changes):
    """Four responses to two prompts, one of them with a hole that an environment wrote."""
    generator = torch.Generator().manual_seed(4)
    old, teacher = -1.0 - torch.rand(2, 12, generator=generator)
    batch = RaggedBatch(LENGTHS, torch.arange(12), MASK, groups=GROUPS, old_log_probs=old, teacher_log_probs=teacher)
    return replace(batch, **changes)


@pytest.fixture(scope="module")
def tables():
    """Logits of policy and teacher at the first token, and after each first token: ``[1 + SIZE, SIZE]``."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(1 + SIZE, SIZE, generator=generator, dtype=torch.float64)
    teacher = 2.0 * torch.randn(1 + SIZE, SIZE, generator=generator, dtype=torch.float64)
    return policy, teacher.log_softmax(-1)


def every_response(policy, teacher):
    """All responses of two tokens, each weighed by its probability, and their log-probs with gradient."""
    first, second = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    rows = torch.stack([torch.zeros_like(first), 1 + first], -1).flatten()
    columns = torch.stack([first, second], -1).flatten()
    log_probs, taught = policy.log_softmax(-1)[rows, columns], teacher[rows, columns]
    responses = log_probs.numel() // 2
    weights = log_probs.detach().view(-1, 2).sum(1).exp().repeat_interleave(2)

    def with_prompt(values):
        return torch.cat([torch.zeros(responses, 1, dtype=values.dtype), values.view(-1, 2)], 1).flatten()

    mask = with_prompt(torch.ones_like(columns)).bool()
    batch = RaggedBatch(
        lengths=torch.full((responses,), 3),
        tokens=with_prompt(columns),
        response_mask=mask,
        old_log_probs=with_prompt(log_probs.detach()),
        teacher_log_probs=with_prompt(taught),
        loss_weights=with_prompt(weights),
        token_shares=with_prompt(weights) / 2,
    )
    return batch, with_prompt(log_probs)


def expected_gradient(tables, algorithm=PURE):
    policy = tables[0].clone().requires_grad_()
    batch, log_probs = every_response(policy, tables[1])
    batch = with_advantages(batch, torch.zeros(batch.num_sequences), algorithm)
    batch = with_distillation(batch, algorithm)
    PolicyLoss(algorithm)(TokenOutputs(log_probs, torch.zeros_like(log_probs)), batch).loss.backward()
    return policy.grad


def divergence_gradient(tables):
    """Of KL(p || q) at each state, weighed by how often the policy comes to it."""
    policy = tables[0].clone().requires_grad_()
    log_p = policy.log_softmax(-1)
    visits = torch.cat([torch.ones(1, dtype=torch.float64), log_p[0].detach().exp()])
    (visits * (log_p.exp() * (log_p - tables[1])).sum(-1)).sum().backward()
    return policy.grad


def test_the_expected_gradient_is_that_of_the_reverse_divergence(tables):
    right = divergence_gradient(tables)
    assert right.abs().max() > 0.1
    torch.testing.assert_close(expected_gradient(tables), right, atol=1e-12, rtol=0)
    twice = PURE.model_copy(update={"distillation_coefficient": 2.0})
    torch.testing.assert_close(expected_gradient(tables, twice), 2 * right, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda batch: batch.teacher_log_probs - batch.old_log_probs,
        lambda batch: -batch.teacher_log_probs,
        lambda batch: torch.roll(batch.old_log_probs - batch.teacher_log_probs, 1),
        lambda batch: torch.expm1(batch.old_log_probs - batch.teacher_log_probs),
    ],
    ids=["away from the teacher", "without the entropy", "of the token before", "of a ratio"],
)
def test_another_formula_has_another_gradient(tables, monkeypatch, wrong):
    monkeypatch.setattr(kl, "reverse_kl", lambda batch: torch.where(batch.response_mask, wrong(batch), 0.0))
    assert (expected_gradient(tables) - divergence_gradient(tables)).abs().max() > 0.05


def test_the_teacher_s_part_is_added_to_the_advantage_that_rewards_give():
    algorithm = AlgorithmSection(advantage="dr_grpo", distillation_coefficient=0.3)
    batch = recorded()
    rewarded = with_advantages(batch, REWARDS, algorithm)
    found = with_distillation(rewarded, algorithm).advantages.tolist()
    centred = {0: 0.5, 1: -0.5, 2: -0.25, 3: 0.25}
    sequence = torch.repeat_interleave(torch.arange(4), LENGTHS).tolist()
    for place, inside in enumerate(MASK.tolist()):
        taught = batch.teacher_log_probs[place].item() - batch.old_log_probs[place].item()
        assert found[place] == pytest.approx(centred[sequence[place]] + 0.3 * taught if inside else 0.0, abs=1e-6)


def test_one_token_that_the_teacher_finds_impossible_is_not_all_of_the_step():
    batch = recorded(teacher_log_probs=torch.full((12,), -500.0))
    found = with_distillation(with_advantages(batch, REWARDS, PURE), PURE).advantages
    assert found[MASK].tolist() == pytest.approx([-20.0] * int(MASK.sum()))
    assert reverse_kl(batch)[MASK].min() > 400, "the metric says what it is"


def test_without_a_coefficient_nothing_is_asked_of_a_teacher():
    batch = with_advantages(recorded(teacher_log_probs=None), REWARDS, AlgorithmSection())
    assert with_distillation(batch, AlgorithmSection()) is batch
    assert teacher_metrics(batch) == {}


@pytest.mark.parametrize("field", ["old_log_probs", "teacher_log_probs"])
def test_a_missing_field_is_named(field):
    batch = with_advantages(recorded(**{field: None}), REWARDS, PURE)
    with pytest.raises(DataError, match=f"field {field} is missing"):
        with_distillation(batch, PURE)
