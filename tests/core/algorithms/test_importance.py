"""Corrections' metrics against NumPy's and plain loops, whole and from parts. Their factors are in test_formulas.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from anytron.algorithms.importance import MOMENTS, with_moments_resolved
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.metric import joined
from anytron.config.algorithm import AlgorithmSection
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import TokenOutputs
from tests.core.algorithms.test_formulas import drawn_batch


def measured(batch, log_probs, entropy, max_tokens, copies, **settings):
    """The metrics as a driver has them, from the parts of micro-batches and replicas, some of them fillers."""
    loss = PolicyLoss(AlgorithmSection(**{"importance_correction": "measured", **settings}))
    plan = UpdatePlan(1, 1, "token-mean", max_tokens)
    (mini_batch,) = plan.mini_batches(batch, seed=0)
    parts = [
        loss(TokenOutputs(log_probs[part.batch.tokens], entropy[part.batch.tokens]), part.batch).metrics
        for share in plan.micro_batches(mini_batch, copies)
        for part in share
    ]
    return with_moments_resolved({name: joined(name, [part[name].item() for part in parts]) for name in parts[0]})


@pytest.mark.parametrize(("max_tokens", "copies"), [(1000, 1), (12, 1), (9, 3), (1, 4)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_metrics_are_those_of_the_whole_mini_batch(level, max_tokens, copies):
    batch, log_probs, entropy = drawn_batch(2, holes=True)
    found = measured(batch, log_probs, entropy, max_tokens, copies, importance_level=level)

    mask = batch.response_mask
    training, rollout = batch.old_log_probs[mask].numpy(), batch.rollout_log_probs[mask].numpy()
    differences = [
        (old - drawn)[own].numpy()
        for old, drawn, own in zip(
            *(values.split(batch.lengths.tolist()) for values in (batch.old_log_probs, batch.rollout_log_probs, mask)),
            strict=True,
        )
    ]
    ratios = [math.exp(row.sum()) for row in differences if len(row)]
    tokens = np.exp(training - rollout)
    weights = tokens if level == "token" else np.repeat(ratios, [len(row) for row in differences if len(row)])
    expected = {
        "rollout/kl": (tokens - 1 - np.log(tokens)).mean(),
        "rollout/log_prob_abs_diff": np.abs(training - rollout).mean(),
        "rollout/log_prob_abs_diff_max": np.abs(training - rollout).max(),
        "rollout/log_prob_correlation": np.corrcoef(training, rollout)[0, 1],
        "rollout/importance_mean": weights.mean(),
        "rollout/importance_max": weights.max(),
        "rollout/importance_clip_fraction": (weights > 2).mean(),
        "rollout/effective_sample_size": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "rollout/sequence_importance_mean": np.mean(ratios),
        "rollout/sequence_importance_max": max(ratios),
    }
    assert {name for name in found if name.startswith("rollout/")} == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name


def test_a_correlation_next_to_1_keeps_its_digits_in_float32():
    generator = torch.Generator().manual_seed(0)
    x = -2 - torch.rand(4096, generator=generator).double()
    d = 1e-4 * torch.randn(4096, generator=generator).double()
    moments = {"x": x, "xx": x * x, "d": d, "dd": d * d, "xd": x * d}
    given = {f"{MOMENTS}{name}": values.float().mean().item() for name, values in moments.items()}
    given |= {f"{MOMENTS}{name}": 1.0 for name in ("w", "ww", "sequences", "s")}
    found = with_moments_resolved(given)["rollout/log_prob_correlation"]
    assert 1 - found == pytest.approx(1 - np.corrcoef(x, x - d)[0, 1], rel=0.05)


def test_other_metrics_are_left_alone():
    assert with_moments_resolved({"loss/total": 1.0}) == {"loss/total": 1.0}
