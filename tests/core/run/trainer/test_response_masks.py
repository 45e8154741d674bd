"""Responses with holes: what an environment wrote is read, and neither trained nor measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import with_advantages
from anytron.config.algorithm import AlgorithmSection
from anytron.record.tracking.progress import Clock
from anytron.run.trainer.experience import Experience, assemble, make_samples
from anytron.run.trainer.metrics import step_metrics
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import TokenOutputs
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.environments.protocol import Outcome
from anytron.task.isolation.failure import Failure
from anytron.task.rewards.registered import REWARDS
from anytron.task.rewards.scoring import RewardScores
from anytron.workers.engines.rollout_engine import Response

PROMPT = TokenizedPrompt("a", "31>", (3, 1, 10), {"answer": "13"})
HOLE = (True, False, False, True, True)
OUTCOMES = [
    Outcome(("1", "13"), 1.0, {"tool_calls": 2.0}),
    Outcome(("13",), 0.25, {}),
    Outcome(("5",), 0.0, {"tool_calls": 9.0}, Failure("It broke.", "")),
]
RESPONSES = [
    Response((1, 7, 7, 1, 3), (-0.1, 0.0, 0.0, -0.2, -0.3), "stop", (0,) * 3, None, HOLE, OUTCOMES[0]),
    Response((1, 3), (-0.4, -0.5), "length", (0,) * 2, None, (True, True), OUTCOMES[1]),
    Response((5,), (-0.6,), "length", (0,), None, (True,), OUTCOMES[2]),
]


class Tokenizer:
    added_tokens_decoder = {}  # noqa: RUF012 - as the attribute of a tokenizer

    def decode(self, tokens, *, skip_special_tokens=False):
        return "".join(map(str, tokens))


@pytest.fixture
def samples():
    return make_samples([PROMPT], [RESPONSES], Tokenizer())


@pytest.fixture
def batch(samples):
    return with_advantages(
        assemble(samples[:2], 1.0, torch.tensor([0, 0])), torch.tensor([1.0, 0.25]), AlgorithmSection()
    )


def mini_batch(batch, aggregation):
    plan = UpdatePlan(epochs=1, count=1, aggregation=aggregation, max_tokens=100)
    (found,) = plan.mini_batches(batch, seed=0)
    return found.batch


def test_the_mask_has_holes(batch):
    assert batch.tokens.tolist() == [3, 1, 10, 1, 7, 7, 1, 3, 3, 1, 10, 1, 3]
    assert batch.response_mask.int().tolist() == [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    expected = [0, 0, 0, -0.1, 0, 0, -0.2, -0.3, 0, 0, 0, -0.4, -0.5]
    torch.testing.assert_close(batch.rollout_log_probs, torch.tensor(expected))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
@pytest.mark.parametrize("field", ["log_probs", "entropy"])
def test_tokens_in_holes_have_no_part_in_loss_and_metrics(batch, aggregation, field):
    batch = mini_batch(batch, aggregation)
    loss = PolicyLoss(AlgorithmSection(entropy_coefficient=0.1, kl_coefficient=0.1, aggregation=aggregation))
    batch = replace(batch, reference_log_probs=batch.rollout_log_probs - 0.1)
    outputs = TokenOutputs(log_probs=batch.rollout_log_probs + 0.01, entropy=torch.ones(batch.num_tokens))
    disturbed = replace(outputs, **{field: torch.where(batch.response_mask, getattr(outputs, field), -300.0)})
    results = []
    for given in (outputs, disturbed):
        values = {name: getattr(given, name).clone().requires_grad_() for name in ("log_probs", "entropy")}
        found = loss(TokenOutputs(**values), batch)
        found.loss.backward()
        for gradient in (value.grad for value in values.values()):
            assert not gradient[~batch.response_mask].any()
            assert gradient[batch.response_mask].all()
        results.append({name: float(value) for name, value in found.metrics.items()})
    assert results[0] == results[1]
    assert results[0]["rollout/log_prob_abs_diff"] == pytest.approx(0.01, rel=1e-4)


def test_metrics_count_the_models_own_tokens(samples):
    rewards = RewardScores(torch.tensor([1.0, 0.25, torch.nan]), {"environment": torch.zeros(3)}, {})
    used = torch.tensor([True, True, False])
    experience = Experience(samples, torch.zeros(3, dtype=torch.int64), rewards, torch.zeros(3), used)
    metrics = step_metrics(1, experience, experience.batch(1.0), [{"update/skipped": 0.0}], Clock(lambda part: None))
    assert metrics["reward/mean"] == 0.625
    assert metrics["reward/group_std_zero_fraction"] == 0
    assert metrics["response/length_mean"] == 2.0
    assert metrics["response/length_max"] == 3.0
    assert metrics["response/truncated_fraction"] == pytest.approx(2 / 3)
    assert metrics["environment/failed"] == 1
    assert metrics["environment/turns_mean"] == 1.5
    assert metrics["environment/turns_max"] == 2
    assert metrics["environment/observation_tokens_mean"] == 1.0
    assert metrics["environment/metrics/tool_calls"] == 1.0


def test_rewards_look_at_the_last_turn_and_not_at_what_the_environment_wrote(samples):
    assert samples[0].response_text == "17713"
    assert REWARDS["exact_match"]()(samples) == [1.0, 1.0, 0.0]
    assert REWARDS["contains"]()([replace(samples[0], data={"answer": "77"})]) == [0.0]
    assert REWARDS["environment"](samples[:2]) == [1.0, 0.25]
