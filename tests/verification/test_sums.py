"""Sums of gradients over micro-batches in several dtypes, and the long sequence of the checks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from anytron.proof.checks import Inapplicable
from anytron.proof.verification.long_sequences import LONGEST, long_sequence
from anytron.proof.verification.sums import COPIES, WEIGHT, compare_sums, copies_of_longest
from anytron.sequences.batch import RaggedBatch


def summed(dtype):
    """Gradients of a first micro-batch, and of all together, added one by one in a dtype."""
    drawn = torch.randn(64, generator=torch.Generator().manual_seed(0))
    alone = {"model.norm.weight": drawn, "lm_head.weight": drawn.outer(drawn)}
    total = {name: one.to(dtype) for name, one in alone.items()}
    for _ in range(COPIES):
        total = {name: total[name] + (WEIGHT * one).to(dtype) for name, one in alone.items()}
    return {name: one.float() for name, one in total.items()}, alone


def test_a_sum_in_float32_passes_and_one_in_bfloat16_fails():
    assert compare_sums("check", *summed(torch.float32)).status == "passed"
    result = compare_sums("check", *summed(torch.bfloat16))
    assert result.status == "failed"
    assert "2 of 2 gradients" in result.detail
    assert "must be float32" in result.detail


def test_gradients_that_are_nothing_are_not_compared():
    nothing = {"model.norm.weight": torch.zeros(3)}
    assert compare_sums("check", nothing, nothing).status == "skipped"


def batch():
    mask = torch.tensor([False, True, True, False, False, True, True, True])
    return RaggedBatch(
        lengths=torch.tensor([3, 5]), tokens=torch.arange(8), response_mask=mask, groups=torch.tensor([0, 0])
    )


def test_copies_are_those_of_the_longest_sequence():
    copies = copies_of_longest(batch(), 3)
    assert copies.lengths.tolist() == [5, 5, 5]
    assert copies.tokens.tolist() == [3, 4, 5, 6, 7] * 3
    assert copies.groups is None


def configured(monkeypatch, *, most, context=None, supervised=False):
    text = SimpleNamespace(max_position_embeddings=context)
    place = "anytron.proof.verification.long_sequences"
    monkeypatch.setattr(f"{place}.model_directory", lambda config: None)
    monkeypatch.setattr(f"{place}.read_hf_config", lambda path: SimpleNamespace(get_text_config=lambda: text))
    return SimpleNamespace(supervised=supervised, rollout=SimpleNamespace(max_new_tokens=most))


@pytest.mark.parametrize(
    ("most", "context", "supervised", "length"),
    [(300, None, False, 302), (300, 64, False, 64), (10**6, None, False, LONGEST), (32, 64, True, 64)],
)
def test_a_long_sequence_is_as_long_as_the_runs_longest(monkeypatch, most, context, supervised, length):
    config = configured(monkeypatch, most=most, context=context, supervised=supervised)
    made = long_sequence(config, batch())
    assert made.batch.lengths.tolist() == [length]
    assert len(made.sequences[0].tokens) == length
    assert int(made.batch.response_mask.sum()) == length - 1


def test_short_responses_need_no_long_sequence(monkeypatch):
    with pytest.raises(Inapplicable, match="at most 4 tokens"):
        long_sequence(configured(monkeypatch, most=4), batch())
