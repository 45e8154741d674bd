"""The KL estimators against the divergence itself."""

from __future__ import annotations

import pytest
import torch

from anytron.algorithms.kl import KL_ESTIMATORS, k1, k2, k3


@pytest.fixture
def models():
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(12, generator=generator, dtype=torch.float64)
    reference = policy + 0.1 * torch.randn(12, generator=generator, dtype=torch.float64)
    return policy.log_softmax(0), reference.log_softmax(0)


def divergence(policy, reference):
    return torch.sum(policy.exp() * (policy - reference))


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(models, estimator):
    policy, reference = models
    torch.testing.assert_close(torch.sum(policy.exp() * estimator(policy, reference)), divergence(policy, reference))


def test_k2_is_close_where_the_models_are(models):
    policy, reference = models
    assert torch.sum(policy.exp() * k2(policy, reference)).item() == pytest.approx(
        divergence(policy, reference).item(), rel=0.1
    )


def test_the_gradient_of_k2_is_that_of_the_divergence_and_that_of_k1_is_none(models):
    """The expectation is over fixed samples, as in training: the gradient flows through log-probs only."""
    start, reference = models

    def gradient(value):
        logits = start.clone().requires_grad_()
        return torch.autograd.grad(value(logits.log_softmax(0)), logits)[0]

    def expected(estimator):
        return gradient(lambda policy: torch.sum(start.exp() * estimator(policy, reference)))

    exact = gradient(lambda policy: divergence(policy, reference))
    torch.testing.assert_close(expected(k2), exact)
    torch.testing.assert_close(expected(k1), torch.zeros_like(exact), atol=1e-12, rtol=0)


def test_k2_and_k3_are_never_negative_and_zero_for_equal_models(models):
    policy, reference = models
    for estimator in (k2, k3):
        assert torch.all(estimator(policy, reference) >= 0)
        assert torch.all(estimator(policy, policy) == 0)


def test_k3_keeps_its_precision_for_nearly_equal_models():
    near = torch.tensor([1e-3], dtype=torch.float32)
    assert k3(torch.zeros(1), near).item() == pytest.approx(0.5e-6, rel=1e-3)


def test_the_estimators_have_names():
    assert dict(KL_ESTIMATORS) == {"k1": k1, "k2": k2, "k3": k3}


def test_k3_is_held_where_it_would_be_all_of_a_steps_loss():
    """As in verl (trainer/ppo/core_algos.py): the log-ratio within 20, the result at most 10, and no gradient there."""
    policy = torch.tensor([0.0, 0.0, 0.0, 0.0], requires_grad=True)
    reference = torch.tensor([89.0, 3.0, -89.0, 2.0])
    found = k3(policy, reference)
    torch.testing.assert_close(found, torch.tensor([10.0, 10.0, 19.0, torch.e**2 - 3.0]).clamp(max=10.0))
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    assert (gradient != 0).tolist() == [False, False, False, True]
