"""Several conversations of one agent: sequences of one response, with one reward and one part in its group."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from anytron.algorithms.registered import with_advantages
from anytron.config.algorithm import AlgorithmSection
from anytron.record.tracking.lines import read_jsonl
from anytron.record.tracking.progress import Clock
from anytron.run.rollout.prefetch import _age
from anytron.run.trainer.experience import Experience, make_samples
from anytron.run.trainer.metrics import step_metrics
from anytron.run.trainer.updates import UpdatePlan
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.environments.protocol import Outcome
from anytron.task.rewards.scoring import RewardScores
from anytron.workers.engines.rollout_engine import Response
from tests.core.record.tracking.test_run_directory import begun, config
from tests.core.run.trainer.test_response_masks import Tokenizer

PROMPTS = [TokenizedPrompt(name, name, (3, 1), {}) for name in "ab"]
REWARDS = [1.0, 0.0, 0.0, 0.5]


def conversation(prompt, mask, version=0, **fields):
    own = sum(mask)
    numbers = range(10, 10 + len(mask))
    log_probs = [-number / 100 if mine else 0.0 for number, mine in zip(numbers, mask, strict=True)]
    return Response(numbers, log_probs, "stop", (version,) * own, None, mask, prompt=prompt, **fields)


def whole(reward, *conversations):
    return replace(conversations[0], environment=Outcome(("said",), reward, {}), others=tuple(conversations[1:]))


RESPONSES = [
    [
        whole(
            REWARDS[0],
            conversation((1, 2), (True, False, True, True)),
            conversation((1, 2), (False, False, True), version=1),  # it shares its first answer
            conversation((7, 8, 9), (True, True)),
        ),
        whole(REWARDS[1], conversation((1, 2), (True, True))),
    ],
    [
        whole(REWARDS[2], conversation((1,), (True,) * 5)),
        whole(REWARDS[3], conversation((1,), (True,)), conversation((4, 5), (True, True, False, True))),
    ],
]
OWN = [6, 2, 5, 4]
"""Tokens of each response that the model wrote."""
RESPONSE_OF = [0, 0, 0, 1, 2, 3, 3]
"""The response of each sequence of the batch."""


@pytest.fixture
def experience():
    samples = make_samples(PROMPTS, RESPONSES, Tokenizer())
    scores = RewardScores(torch.tensor(REWARDS), {"environment": torch.tensor(REWARDS)}, {})
    return Experience(samples, torch.tensor([0, 0, 1, 1]), scores, torch.zeros(4), torch.ones(4, dtype=torch.bool))


def expected_advantages():
    """GRPO without the deviation, by hand: each session counts once in the mean of its group."""
    return [0.5, -0.5, -0.25, 0.25]


def check_advantages(batch, rewards, advantage="dr_grpo", factor=1.0):
    found = with_advantages(batch, rewards, AlgorithmSection(advantage=advantage)).advantages
    expected = torch.zeros(batch.num_tokens)
    for place, part in enumerate(torch.arange(batch.num_tokens).split(batch.lengths.tolist())):
        expected[part] = factor * expected_advantages()[RESPONSE_OF[place]]
    torch.testing.assert_close(found, expected.where(batch.response_mask, 0.0))


def test_each_conversation_is_a_sequence_with_the_sessions_reward(experience):
    batch = experience.batch(1.0)
    assert batch.lengths.tolist() == [6, 5, 5, 4, 6, 2, 6]
    assert batch.responses.tolist() == RESPONSE_OF
    assert batch.groups.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert experience.used_rewards.tolist() == [REWARDS[one] for one in RESPONSE_OF]
    assert batch.response_counts.tolist() == [3, 1, 2, 2, 5, 1, 3]
    assert not batch.rollout_log_probs[~batch.response_mask].any()


@pytest.mark.parametrize(("advantage", "factor"), [("dr_grpo", 1.0), ("rloo", 2.0)])
def test_a_session_counts_once_in_its_groups_mean(experience, advantage, factor):
    batch, rewards = experience.batch(1.0), experience.used_rewards
    check_advantages(batch, rewards, advantage, factor)
    with pytest.raises(AssertionError):  # the twin: each conversation counts, and the first group's mean is 3/4
        check_advantages(replace(batch, responses=None), rewards, advantage, factor)


def test_a_sample_that_is_not_used_takes_its_conversations_along(experience):
    chosen = replace(experience, used=torch.tensor([False, True, True, True]))
    batch = chosen.batch(1.0)
    assert batch.lengths.tolist() == [4, 6, 2, 6]
    assert batch.responses.tolist() == [0, 1, 2, 2]
    assert chosen.used_rewards.tolist() == [0.0, 0.0, 0.5, 0.5]
    assert replace(experience, used=torch.tensor([False, True, True, False])).batch(1.0).responses is None


def weights_of(batch, aggregation, responses):
    """The sum of the weights in the loss of each response's tokens."""
    plan = UpdatePlan(1, 1, aggregation, 100, length_constant=10)
    (mini_batch,) = plan.mini_batches(batch, seed=0)
    weights = mini_batch.batch.loss_weights.split(batch.lengths.tolist())
    found = torch.zeros(4)
    for response, one in zip(responses, weights, strict=True):
        found[response] += one.sum()
    return found.tolist()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence-mean", [1 / 4] * 4),
        ("token-mean", [own / sum(OWN) for own in OWN]),
        ("token-sum", OWN),
        ("length-constant", [own / (4 * 10) for own in OWN]),
    ],
)
def test_a_response_of_several_conversations_weighs_as_one_of_one(experience, aggregation, expected):
    batch = experience.batch(1.0)
    assert weights_of(batch, aggregation, RESPONSE_OF) == pytest.approx(expected)
    if aggregation in ("sequence-mean", "length-constant"):
        twin = weights_of(replace(batch, responses=None), aggregation, RESPONSE_OF)
        assert twin != pytest.approx(expected)


def test_mini_batches_and_processes_keep_a_responses_conversations_together(experience):
    batch = experience.batch(1.0)
    plan = UpdatePlan(1, 2, "sequence-mean", 100)
    for mini_batch in plan.mini_batches(batch, seed=0):
        assert mini_batch.batch.loss_weights.sum().item() == pytest.approx(1)
        numbers = mini_batch.batch.responses.tolist()
        assert numbers in ([0, 0, 0, 1], [2, 3, 3])
        assert pickle.loads(pickle.dumps(mini_batch.batch)).responses.tolist() == numbers


def test_a_kl_penalty_in_the_reward_is_that_of_all_conversations(experience):
    batch = experience.batch(1.0)
    batch = replace(
        batch,
        old_log_probs=torch.zeros(batch.num_tokens),
        reference_log_probs=torch.full((batch.num_tokens,), -1.0),
    )
    algorithm = AlgorithmSection(
        advantage="dr_grpo", kl_coefficient=0.1, kl_placement="reward", kl_estimator="k1", normalize_std=False
    )
    found = with_advantages(batch, experience.used_rewards, algorithm).advantages
    first, second = REWARDS[0] - 0.1 * OWN[0], REWARDS[1] - 0.1 * OWN[1]
    own = [part[mask] for part, mask in zip(
        found.split(batch.lengths.tolist()), batch.response_mask.split(batch.lengths.tolist()), strict=True
    )]  # fmt: skip
    for part in own[:3]:
        torch.testing.assert_close(part, torch.full_like(part, (first - second) / 2))


def test_metrics_and_records_cover_all_conversations(experience, tmp_path):
    metrics = step_metrics(1, experience, experience.batch(1.0), [{"update/skipped": 0.0}], Clock(lambda part: None))
    assert metrics["environment/conversations_mean"] == 7 / 4
    assert metrics["response/length_mean"] == sum(OWN) / 4
    assert metrics["environment/observation_tokens_mean"] == 1 / 4
    assert metrics["reward/mean"] == pytest.approx(sum(REWARDS) / 4)
    assert _age(RESPONSES, 1)["rollout/age_mean"] == (sum(OWN) - 1) / sum(OWN)
    with begun(config(tmp_path, log_samples=4)) as run:
        run.write_samples(1, experience.samples, experience.rewards)
    lines = list(read_jsonl(run.path / "samples.jsonl"))
    assert [len(line.get("others", ())) for line in lines] == [2, 0, 0, 1]
    assert lines[0]["others"][1] == {
        "prompt": "789", "response": "1011", "response_tokens": [10, 11], "response_mask": [1, 1],
    }  # fmt: skip
