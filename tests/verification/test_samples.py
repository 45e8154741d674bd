"""Samples of a prompt that are equal: by chance, or because requests share a seed."""

from __future__ import annotations

import pytest
import torch

from anytron.proof.verification.comparisons import compare_samples
from anytron.sequences.batch import RaggedBatch


def batch(*rows, log_prob):
    """Two samples of each prompt: rows of one prompt token and four of the response."""
    tokens = torch.tensor(rows)
    own = torch.tensor([False, True, True, True, True]).repeat(len(rows))
    return RaggedBatch(
        lengths=torch.full((len(rows),), 5),
        tokens=tokens.flatten(),
        response_mask=own,
        groups=torch.arange(len(rows)) // 2,
        rollout_log_probs=torch.where(own, log_prob, 0.0),
    )


ONE, OTHER, THIRD = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("rows", "log_prob", "status", "says"),
    [
        ((ONE, OTHER, THIRD, THIRD), -2.0, "passed", "the samples of 1 of 2 prompts differ"),
        ((ONE, ONE, THIRD, THIRD), -2.0, "failed", "with probability 1e-07: look at the seeds of requests"),
        ((ONE, ONE, THIRD, THIRD), -0.01, "skipped", "with probability 0.92: too little to tell"),
    ],
)
def test_equal_samples_fail_unless_chance_makes_them(rows, log_prob, status, says):
    result = compare_samples("samples-of-a-prompt", batch(*rows, log_prob=log_prob), narrowed=False)
    assert result.status == status
    assert says in result.detail


@pytest.mark.parametrize(("rows", "status"), [((ONE, ONE), "skipped"), ((ONE, OTHER), "passed")])
def test_equal_samples_may_be_the_only_ones_of_top_k(rows, status):
    result = compare_samples("samples-of-a-prompt", batch(*rows, log_prob=-9.0), narrowed=True)
    assert result.status == status, result.detail
