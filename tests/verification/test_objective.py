"""The definitions of advantages and losses agree with the product, and what breaks either fails its check."""

from __future__ import annotations

import itertools

import pytest
import torch
import yaml

from anytron.config.schema import RunConfig
from anytron.proof.verification.objective import check_advantages, check_loss
from anytron.tasks import Advantages, TokenLosses
from tests.house import ROOT

EXAMPLES = {
    name: yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text("utf-8"))
    for name in ("grpo_sort", "ppo_sort", "distillation_sort")
}
OF_TOKENS = ({}, {"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1", "gamma": 0.9})
TERMS = (
    {},
    {"kl_coefficient": 0.1, "entropy_coefficient": 0.3, "dual_clip": 1.5},
    {"importance_correction": "truncated", "kl_coefficient": 0.1, "kl_estimator": "k2"},
    {"importance_correction": "masked", "importance_level": "sequence", "importance_floor": 0.3},
)


def configured(example="grpo_sort", **algorithm):
    tree = EXAMPLES[example]
    return RunConfig.model_validate({**tree, "algorithm": {**tree.get("algorithm", {}), **algorithm}})


@pytest.mark.parametrize(
    ("advantage", "example"),
    [
        *((name, "grpo_sort") for name in ("grpo", "dr_grpo", "rloo")),
        *((name, "grpo_sort") for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")),
        ("gae", "ppo_sort"),
        ("none", "distillation_sort"),
    ],
)
def test_every_estimator_agrees_with_its_definition(advantage, example):
    for terms, normal in itertools.product(OF_TOKENS, (True, False)):
        result = check_advantages("advantages", configured(example, advantage=advantage, normalize_std=normal, **terms))
        assert result.status == "passed", result.detail


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gspo_token", "cispo", "sapo"])
def test_every_loss_agrees_with_its_definition(loss):
    for terms, aggregation in itertools.product(TERMS, ("token-mean", "sequence-mean", "token-sum", "length-constant")):
        result = check_loss("loss", configured(loss=loss, aggregation=aggregation, **terms))
        assert result.status == "passed", result.detail
        assert result.detail == f"{loss}, {aggregation}: the loss and its gradient at 30 log-probs"


def same_for_all(batch, rewards, algorithm):
    return Advantages(batch.advantages * 0.0 + rewards.mean())


def against_the_critic(batch, rewards, algorithm):
    return Advantages(torch.where(batch.response_mask, -batch.values, 0.0), batch.values)


def of_all_tokens(batch, rewards, algorithm):
    return Advantages(batch.old_log_probs - batch.old_log_probs.mean())


def reinforce(tokens, algorithm):
    return TokenLosses(-tokens.advantages * tokens.log_probs)


def mean_of_the_micro_batch(tokens, algorithm):
    return TokenLosses(-tokens.advantages * tokens.log_probs / tokens.response_mask.sum())


@pytest.mark.parametrize(
    ("check", "key", "function", "status", "says"),
    [
        (check_advantages, "advantage", same_for_all, "passed", "only the policy's own tokens count"),
        (check_advantages, "advantage", of_all_tokens, "failed", "tokens that the policy did not write change"),
        (check_loss, "loss", reinforce, "passed", "parts add up"),
        (check_loss, "loss", mean_of_the_micro_batch, "failed", "one micro-batch and one for each sequence"),
    ],
)
def test_a_function_of_yours_is_asked_on_what_it_depends(check, key, function, status, says):
    result = check("check", configured(**{key: f"{__name__}:{function.__name__}"}))
    assert result.status == status, result.detail
    assert says in result.detail


def test_an_estimator_of_yours_gets_the_critic_s_values():
    config = configured("ppo_sort", advantage=f"{__name__}:{against_the_critic.__name__}")
    assert check_advantages("advantages", config).status == "passed"


@pytest.mark.parametrize("term", ["kl_coefficient", "entropy_coefficient", "dual_clip"])
def test_a_term_that_is_dropped_fails(term, monkeypatch):
    config = configured(kl_coefficient=0.1, entropy_coefficient=0.3, dual_clip=1.5)
    nothing = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0, "dual_clip": None}
    dropped = config.algorithm.model_copy(update={term: nothing[term]})
    monkeypatch.setattr("anytron.proof.verification.objective.PolicyLoss", lambda _: policy_loss(dropped))
    result = check_loss("loss", config)
    assert result.status == "failed"
    assert "differ from the formula's" in result.detail


def policy_loss(algorithm):
    from anytron.algorithms.policy_loss import PolicyLoss

    return PolicyLoss(algorithm)


def test_cross_entropy_agrees_with_its_definition(monkeypatch):
    tree = EXAMPLES["grpo_sort"]
    config = RunConfig.model_validate({**tree, "rewards": [], "algorithm": {"name": "sft"}})
    assert check_loss("loss", config).status == "passed"
    monkeypatch.setattr(torch, "sum", lambda values, original=torch.sum: original(values.roll(1)) * 1.01)
    assert check_loss("loss", config).status == "failed"
