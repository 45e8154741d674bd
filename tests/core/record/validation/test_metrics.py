"""The metrics of a set, of rewards written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from anytron.config.scoring import ValidationSetSection
from anytron.record.validation import set_metrics
from anytron.task.rewards.sample import Sample
from anytron.task.rewards.scoring import RewardScores

NAN = math.nan


def metrics(rewards, *, lengths=None, **keys):
    section = ValidationSetSection.model_validate(
        {"name": "a", "data": {"source": "jsonl"}, "samples_per_prompt": len(rewards[0]), **keys}
    )
    flat = [reward for group in rewards for reward in group]
    lengths = lengths or [1] * len(flat)
    samples = [
        Sample(f"p{index // len(rewards[0])}", "", "", (1,), (2,) * length, (0.0,) * length, index % 4 != 0, {})
        for index, length in enumerate(lengths)
    ]
    found = set_metrics(section, samples, RewardScores(torch.tensor(flat), {}, {}))
    return {name.removeprefix("validation/a/"): value for name, value in found.items()}


def test_prompts_count_alike_whatever_their_responses():
    found = metrics([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], pass_at=[1, 2, 4])
    assert found["mean@4"] == pytest.approx(5 / 12)
    assert found["pass@1"] == pytest.approx(5 / 12)
    assert found["pass@2"] == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert (found["pass@4/low"], found["pass@4/high"]) == (0.0, 1.0)
    assert found["failed"] == 0


def test_a_response_passes_at_the_threshold_also_where_float32_rounds():
    assert metrics([[0.7], [0.69]], pass_threshold=0.7)["pass@1"] == 0.5
    assert metrics([[0.1 + 0.2], [-1.0]], pass_threshold=0.3)["pass@1"] == 0.5
    assert metrics([[-0.5], [-1.0]], pass_threshold=-0.5)["pass@1"] == 0.5
    weighted = torch.stack([weight * torch.ones(1) for weight in (0.35, 0.45, 0.2)]).sum(0).item()
    assert weighted < 1.0, "all three functions give 1, and float32 does not add up to it"
    assert metrics([[weighted], [0.9999]])["pass@1"] == 0.5


def test_dropped_responses_neither_pass_nor_fail():
    found = metrics([[1, NAN, 0, 0], [NAN, NAN, NAN, NAN], [NAN, NAN, 1, 1]], pass_at=[1, 3])
    assert found["mean@4"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass@1"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass@3"] == 1.0, "of the first prompt alone"
    assert not {"pass@3/low", "pass@3/high"} & found.keys()
    assert found["failed"] == 7


def test_where_no_prompt_is_left_a_metric_is_not_a_number():
    found = metrics([[1, NAN], [NAN, 0]], pass_at=[2])
    assert math.isnan(found["pass@2"])
    assert found["mean@2"] == 0.5


def test_lengths_and_truncation_are_those_of_all_responses():
    found = metrics([[0, 0], [0, 0]], lengths=[1, 2, 3, 6])
    assert found["response/length_mean"] == 3
    assert found["response/truncated_fraction"] == 0.25
