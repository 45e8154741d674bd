"""Tokens that are drawn as their probabilities say, and draws of other kinds."""

from __future__ import annotations

import pytest
import torch

from anytron.proof.verification.frequencies import Frequencies, telling_temperature
from anytron.workers.engines.rollout_engine import SamplingParams
from anytron.workers.engines.sampling import TokenDraws

ENDS = (1, 2)
PARAMETERS = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"top_k": 7, "top_p": 0.8},
    {"min_new_tokens": 10, "end_token_ids": ENDS},
]


def params(**keys):
    return SamplingParams(max_new_tokens=32, **keys)


def found(promised, drawn=None, *, shift=0):
    """Draw 32 tokens of 32 responses from random logits of 50 tokens."""
    draw, frequencies = torch.Generator().manual_seed(3), Frequencies(promised, "float32")
    for response in range(32):
        logits = 1.5 * torch.randn(32, 50, generator=draw)
        draws = TokenDraws(drawn or promised, [1000 + response])
        tokens = [draws(logits[[max(0, place - shift)]], place)[0].item() for place in range(len(logits))]
        frequencies.add(logits, torch.tensor([3, *tokens]))
    return frequencies.result("token-frequencies")


@pytest.mark.parametrize("keys", PARAMETERS, ids=str)
def test_draws_within_the_parameters_pass(keys):
    result = found(params(**keys))
    assert result.status == "passed", result.detail


@pytest.mark.parametrize("keys", PARAMETERS[1:], ids=str)
def test_parameters_that_are_ignored_fail(keys):
    result = found(params(**keys), params())
    assert result.status == "failed"
    assert "drawn tokens are not allowed by" in result.detail


def test_parameters_that_nobody_set_fail():
    assert found(params(), params(top_k=5)).status == "failed"
    assert "an end token" in found(params(end_token_ids=ENDS), params(end_token_ids=ENDS, min_new_tokens=99)).detail


def test_another_temperature_fails():
    result = found(params(), params(temperature=0.7))
    assert result.status == "failed"
    assert "the log-prob is off its expectation by +" in result.detail


def test_draws_from_another_distribution_fail():
    assert found(params(), shift=1).status == "failed"


def test_a_model_that_is_certain_says_nothing():
    frequencies = Frequencies(params(), "float32")
    frequencies.add(100.0 * torch.eye(50)[:32], torch.arange(-1, 32).clamp(min=0))
    assert frequencies.result("token-frequencies").status == "skipped"


def test_the_temperature_falls_until_some_tokens_are_more_probable_than_others():
    logits = torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    assert telling_temperature(8.0 * logits, 1.0) == 1.0
    assert telling_temperature(logits, 1.0) == 0.25
    assert 0.0 < telling_temperature(torch.zeros(4, 16), 1.0) < 1e-3
