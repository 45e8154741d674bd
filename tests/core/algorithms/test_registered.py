"""Estimators and losses by name: built-in ones, and functions that a configuration brings."""

import pickle
from dataclasses import replace

import pytest
import torch

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import NamedLoss, load_advantage, load_loss, with_advantages
from anytron.batch import RaggedBatch, TokenOutputs
from anytron.config.schema import AlgorithmSection
from anytron.errors import ConfigError, DataError

MASK = torch.tensor([False, True, True, False, True])
BATCH = RaggedBatch(torch.tensor([3, 2]), torch.arange(5), MASK)
REWARDS = torch.tensor([1.0, 0.0])
TRAINED = replace(BATCH, advantages=torch.ones(5), loss_weights=MASK / 3, token_shares=MASK / 3)
OUTPUTS = TokenOutputs(log_probs=torch.full((5,), -1.0, requires_grad=True), entropy=torch.ones(5))

FUNCTIONS = """
import torch
from anytron.algorithms.contract import Advantages, LossOutputs

def plain(batch, rewards, algorithm, group_size):
    return Advantages(torch.repeat_interleave(rewards, batch.lengths) * batch.response_mask)
def short(batch, rewards, algorithm, group_size): return Advantages(rewards)
def broken(batch, rewards, algorithm, group_size): return Advantages(torch.full((5,), torch.nan))
def bare(batch, rewards, algorithm, group_size): return rewards
def narrow(batch): return batch

def reinforce(outputs, batch, algorithm):
    loss = -torch.sum(batch.loss_weights * batch.advantages * outputs.log_probs)
    return LossOutputs(loss, {"loss/policy": loss.detach()})
def per_token(outputs, batch, algorithm): return LossOutputs(outputs.log_probs, {})
def number(outputs, batch, algorithm): return 0.0
"""


@pytest.fixture
def named(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name: f"{tmp_path}/mine.py:{name}"


def test_an_estimator_of_the_user_is_used(named):
    batch = with_advantages(BATCH, REWARDS, 2, AlgorithmSection(advantage=named("plain")))
    assert batch.advantages.tolist() == [0, 1, 1, 0, 0]
    assert batch.returns is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", r"advantages of shape \[2\] for 5 tokens"),
        ("broken", "advantages that are not finite"),
        ("bare", "a Tensor, not an Advantages"),
    ],
)
def test_what_an_estimator_returns_is_checked(named, name, says):
    with pytest.raises(DataError, match=rf"(?s)algorithm\.advantage.*{says}"):
        with_advantages(BATCH, REWARDS, 2, AlgorithmSection(advantage=named(name)))


def test_an_estimator_beside_a_critic_gives_returns(named):
    with pytest.raises(DataError, match="no returns"):
        with_advantages(replace(BATCH, values=torch.zeros(5)), REWARDS, 2, AlgorithmSection(advantage=named("plain")))


@pytest.mark.parametrize(
    ("section", "load", "says"),
    [
        ({"advantage": "grop"}, load_advantage, "did you mean grpo"),
        ({"loss": "cliped"}, load_loss, "did you mean clipped"),
        ({"loss": "nowhere.py:f"}, load_loss, "there is no file"),
    ],
)
def test_an_unknown_name_is_refused(section, load, says):
    with pytest.raises(ConfigError, match=says):
        load(AlgorithmSection(**section))


def test_a_function_of_another_signature_is_refused(named):
    with pytest.raises(ConfigError, match=r"(?s)algorithm\.advantage.*let it take \(batch, rewards"):
        load_advantage(AlgorithmSection(advantage=named("narrow")))
    with pytest.raises(ConfigError, match=r"(?s)algorithm\.loss.*let it take \(outputs, batch"):
        load_loss(AlgorithmSection(loss=named("narrow")))


def test_the_default_loss_is_the_clipped_one():
    algorithm = AlgorithmSection(clip_high=0.3, entropy_coefficient=0.1)
    loss = load_loss(algorithm)(OUTPUTS, TRAINED).loss
    assert torch.equal(loss, PolicyLoss.from_config(algorithm)(OUTPUTS, TRAINED).loss)


def test_a_loss_of_the_user_travels_by_its_name(named):
    loss = pickle.loads(pickle.dumps(load_loss(AlgorithmSection(loss=named("reinforce")))))
    assert isinstance(loss, NamedLoss)
    assert loss(OUTPUTS, TRAINED).loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [("per_token", r"a loss of shape \[5\]"), ("number", "not a LossOutputs")],
)
def test_what_a_loss_returns_is_checked(named, name, says):
    with pytest.raises(DataError, match=rf"(?s)algorithm\.loss.*{says}"):
        load_loss(AlgorithmSection(loss=named(name)))(OUTPUTS, TRAINED)
