"""With engine.on_policy=bitwise the policy's loss refuses the first token whose log-prob is not the rollout's."""

import math
from dataclasses import replace

import pytest
import torch

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import DataError, EngineError
from anytron.config.algorithm import AlgorithmSection
from anytron.sequences.batch import RaggedBatch, TokenOutputs, as_filler

TOKENS = [10, 11, 12, 13, 20, 21, 22, 23, 24]
"""Two sequences, with prompts of 2 and 1 tokens."""
RESPONSES = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1]).bool()
LOG_PROBS = torch.where(RESPONSES, -torch.arange(1.0, 10.0) / 7, 0.0)


def batch(**changes):
    shares = RESPONSES / RESPONSES.sum()
    made = RaggedBatch(
        lengths=torch.tensor([4, 5]),
        tokens=torch.tensor(TOKENS),
        response_mask=RESPONSES,
        rollout_log_probs=LOG_PROBS,
        old_log_probs=LOG_PROBS,
        advantages=RESPONSES.float(),
        loss_weights=shares,
        token_shares=shares,
    )
    return replace(made, **changes)


def loss(found, own=LOG_PROBS, config="/runs/a/config.yaml"):
    return PolicyLoss(AlgorithmSection(), config)(TokenOutputs(own.clone().requires_grad_(), torch.ones(9)), found)


def moved(place, value=None):
    values = LOG_PROBS.clone()
    values[place] = torch.nextafter(values[place], torch.tensor(0.0)) if value is None else value
    return values


def test_equal_log_probs_pass():
    metrics = loss(batch()).metrics
    assert metrics["policy/rollout_mismatch"].item() == 0.0
    assert metrics["rollout/log_prob_abs_diff"].item() == 0.0


def test_the_last_bit_counts_and_the_error_names_the_token():
    values = moved(6)
    values[8] -= 1.0
    with pytest.raises(EngineError) as error:
        loss(batch(old_log_probs=values))
    found = error.value
    assert found.where == "token 22, number 2 of its response, in a sequence that begins with the tokens 20, 21"
    computed, expected = (float(number) for number in (values[6], LOG_PROBS[6]))
    assert f"training computes {computed:.9g}, the rollout computed {expected:.9g};" in found.why
    assert f"{computed:.9g}" != f"{expected:.9g}"
    assert "2 of 6 tokens differ" in found.why
    assert "anytron compare /runs/a/config.yaml;" in found.fix


@pytest.mark.parametrize("place", [2, 5, 8])
@pytest.mark.parametrize("field", ["old_log_probs", "rollout_log_probs", "both"])
def test_nan_is_no_log_prob(field, place):
    names = ["old_log_probs", "rollout_log_probs"] if field == "both" else [field]
    with pytest.raises(EngineError, match=f"token {TOKENS[place]}, "):
        loss(batch(**dict.fromkeys(names, moved(place, math.nan))))


def test_without_old_log_probs_the_current_ones_are_compared():
    assert loss(batch(old_log_probs=None)).metrics["policy/rollout_mismatch"].item() == 0.0
    with pytest.raises(EngineError, match="token 12, "):
        loss(batch(old_log_probs=None), own=moved(2))


def test_after_an_update_the_current_log_probs_may_differ():
    assert loss(batch(), own=LOG_PROBS - 0.5).metrics["policy/rollout_mismatch"].item() == 0.0


def test_prompts_and_fillers_are_not_compared():
    loss(batch(old_log_probs=moved(1, -3.0)))
    loss(as_filler(batch(old_log_probs=moved(6))))


def test_log_probs_of_the_rollout_are_needed():
    with pytest.raises(DataError, match="rollout_log_probs"):
        loss(batch(rollout_log_probs=None))


def test_the_usual_mode_allows_differences():
    metrics = loss(batch(old_log_probs=moved(6)), config="").metrics
    assert "policy/rollout_mismatch" not in metrics
    assert metrics["rollout/log_prob_abs_diff"].item() > 0.0
