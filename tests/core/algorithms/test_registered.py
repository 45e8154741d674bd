"""Estimators and losses by name: built-in ones, and functions that a configuration brings."""

import pickle
from dataclasses import replace
from statistics import StatisticsError

import pytest
import torch

from anytron.algorithms import registered
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import load_advantage, policy_loss_function, with_advantages
from anytron.base.errors import ConfigError, DataError
from anytron.config.algorithm import AlgorithmSection
from anytron.sequences.batch import RaggedBatch, TokenOutputs

MASK = torch.tensor([False, True, True, False, True])
BATCH = RaggedBatch(torch.tensor([3, 2]), torch.arange(5), MASK)
REWARDS = torch.tensor([1.0, 0.0])
TRAINED = replace(BATCH, advantages=torch.ones(5), loss_weights=MASK / 3, token_shares=MASK / 3)
OUTPUTS = TokenOutputs(log_probs=torch.full((5,), -1.0, requires_grad=True), entropy=torch.ones(5))

FUNCTIONS = """
import errno
import statistics
import torch
from anytron.algorithms.contract import Advantages, TokenLosses
from anytron.base.errors import ConfigError

def plain(batch, rewards, algorithm):
    return Advantages(torch.repeat_interleave(rewards, batch.lengths) * batch.response_mask)
def short(batch, rewards, algorithm): return Advantages(rewards)
def broken(batch, rewards, algorithm): return Advantages(torch.full((5,), torch.nan))
def bare(batch, rewards, algorithm): return rewards
def narrow(batch): return batch
def wide(batch, rewards, algorithm):
    return Advantages(torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.int64))

def listed(batch, rewards, algorithm): return Advantages([0.0] * 5)

def reinforce(tokens, algorithm):
    losses = -algorithm.options.get("factor", 1.0) * tokens.advantages * tokens.log_probs
    return TokenLosses(losses, {"mine/advantage": tokens.advantages})
def short_loss(tokens, algorithm): return TokenLosses(tokens.log_probs.sum())
def bare_loss(tokens, algorithm): return tokens.log_probs
def number(tokens, algorithm): return TokenLosses(0.0)
def detached(tokens, algorithm): return TokenLosses(tokens.log_probs.detach())
def metric(tokens, algorithm): return TokenLosses(tokens.log_probs, {"mine": tokens.log_probs.mean()})
def largest(tokens, algorithm):
    outside = torch.where(tokens.response_mask, torch.arange(5.0), torch.inf)
    return TokenLosses(tokens.log_probs, {"mine": outside, "mine_max": outside, "mine/low_max": -1 - outside})
def outside(tokens, algorithm):
    return TokenLosses((tokens.log_probs / tokens.response_mask))
def usurping(tokens, algorithm):
    return TokenLosses(-tokens.log_probs, dict.fromkeys(["loss/total", "reward/mean", "grad_norm"], tokens.entropy))

def raising(batch, rewards, algorithm): return Advantages(looked_up({}))
def looked_up(table): return table["gone"]
def raising_loss(tokens, algorithm): return statistics.mean([])  # in a file of Python's
class Called:
    def __call__(self, tokens, algorithm): return 1 / 0
called = Called()
def asking(tokens, algorithm): raise ConfigError("It wants an option.")
def writing(tokens, algorithm): raise OSError(errno.ENOSPC, "No space left on device")
def two_more(tokens, algorithm, margin): return TokenLosses(tokens.log_probs)
"""


@pytest.fixture
def named(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name: f"{tmp_path}/mine.py:{name}"


def test_an_estimator_of_the_user_is_used(named):
    batch = with_advantages(BATCH, REWARDS, AlgorithmSection(advantage=named("plain")))
    assert batch.advantages.tolist() == [0, 1, 1, 0, 0]
    assert batch.returns is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", r"advantages of shape \[2\] for 5 tokens"),
        ("broken", "advantages that are not finite"),
        ("bare", "a Tensor, not an Advantages"),
        ("listed", "a list as advantages"),
    ],
)
def test_what_an_estimator_returns_is_checked(named, name, says):
    with pytest.raises(DataError, match=rf"(?s)algorithm\.advantage.*{says}"):
        with_advantages(BATCH, REWARDS, AlgorithmSection(advantage=named(name)))


@pytest.mark.parametrize(
    ("name", "key", "kind", "says", "line"),
    [
        ("raising", "algorithm.advantage", KeyError, "KeyError: 'gone'", "def looked_up"),
        ("raising_loss", "algorithm.loss", StatisticsError, "StatisticsError: mean requires", "def raising_loss"),
        ("called", "algorithm.loss", ZeroDivisionError, "ZeroDivisionError: division by zero", "def __call__"),
    ],
)
def test_what_a_function_raises_is_said_with_the_key_and_the_line_of_its_file(named, name, key, kind, says, line):
    section = AlgorithmSection(**{"advantage": named("plain"), key.removeprefix("algorithm."): named(name)})
    with pytest.raises(DataError, match=r"^(A policy's loss|An estimator of advantages) raised an exception") as caught:
        PolicyLoss(section)(OUTPUTS, with_advantages(TRAINED, REWARDS, section))
    error = caught.value
    file = named(name).partition(":")[0]
    number = next(at for at, text in enumerate(FUNCTIONS.splitlines(), start=1) if text.strip().startswith(line))
    assert error.where == f"{key}: {named(name)}"
    first, _, frames = error.why.partition("\n")
    assert first.startswith(says)
    assert first.endswith(f"(line {number} of {file})")
    assert frames.splitlines()[1].startswith(f'  File "{file}", line ')
    assert error.fix.startswith(f"correct line {number} of {file}; ")
    assert isinstance(error.__cause__, kind)


@pytest.mark.parametrize(("name", "kind"), [("asking", ConfigError), ("writing", OSError)])
def test_errors_of_ours_and_of_the_machine_stay_what_they_are(named, name, kind):
    with pytest.raises(kind):
        PolicyLoss(AlgorithmSection(loss=named(name)))(OUTPUTS, TRAINED)


def test_a_bug_of_a_registered_function_is_none_of_the_user(monkeypatch):
    monkeypatch.setattr(registered, "LOSSES", {"ppo_clip": lambda tokens, algorithm: {}["ours"]})
    with pytest.raises(KeyError, match="ours"):
        PolicyLoss(AlgorithmSection())(OUTPUTS, TRAINED)


def test_advantages_become_float32(named):
    """As NumPy makes them they would make the loss float64, which some devices do not have."""
    batch = with_advantages(BATCH, REWARDS, AlgorithmSection(advantage=named("wide")))
    assert (batch.advantages.dtype, batch.returns.dtype) == (torch.float32, torch.float32)


def test_a_metric_of_a_loss_is_averaged_over_responses_or_the_largest(named):
    metrics = PolicyLoss(AlgorithmSection(loss=named("largest")))(OUTPUTS, TRAINED).metrics
    assert metrics["loss/metrics/mine"].item() == pytest.approx(7 / 3)
    assert metrics["loss/metrics/mine_max"].item() == 4.0
    assert metrics["loss/metrics/mine/low_max"].item() == -2.0
    filler = replace(TRAINED, loss_weights=torch.zeros(5), token_shares=torch.zeros(5))
    metrics = PolicyLoss(AlgorithmSection(loss=named("largest")))(OUTPUTS, filler).metrics
    assert metrics["loss/metrics/mine"].item() == 0.0
    assert metrics["loss/metrics/mine_max"].item() == -torch.inf, "the largest of all micro-batches is another's"


def test_a_metric_of_a_loss_takes_the_place_of_none_of_ours(named):
    """`grad_norm` is the engine's, and `reward/mean` the driver's."""
    found = PolicyLoss(AlgorithmSection(loss=named("usurping")))(OUTPUTS, TRAINED)
    assert found.metrics["loss/total"].item() == found.loss.item() == pytest.approx(1.0)
    theirs = {name for name in found.metrics if name not in PolicyLoss(AlgorithmSection())(OUTPUTS, TRAINED).metrics}
    assert theirs == {f"loss/metrics/{name}" for name in ("loss/total", "reward/mean", "grad_norm")}


def test_an_estimator_beside_a_critic_gives_returns(named):
    with pytest.raises(DataError, match="no returns"):
        with_advantages(replace(BATCH, values=torch.zeros(5)), REWARDS, AlgorithmSection(advantage=named("plain")))


@pytest.mark.parametrize(
    ("section", "load", "says"),
    [
        ({"advantage": "grop"}, load_advantage, "did you mean grpo"),
        ({"loss": "ppo_clpi"}, policy_loss_function, "did you mean ppo_clip"),
        ({"loss": "nowhere.py:f"}, policy_loss_function, "there is no file"),
    ],
)
def test_an_unknown_name_is_refused(section, load, says):
    with pytest.raises(ConfigError, match=says):
        load(AlgorithmSection(**section))


def test_a_function_of_another_signature_is_refused(named):
    with pytest.raises(ConfigError, match=r"(?s)algorithm\.advantage.*let it take \(batch, rewards"):
        load_advantage(AlgorithmSection(advantage=named("narrow")))
    for name in ("narrow", "two_more"):
        with pytest.raises(ConfigError, match=r"(?s)algorithm\.loss.*let it take \(tokens, algorithm\)"):
            policy_loss_function(AlgorithmSection(loss=named(name)))


def test_a_loss_of_the_user_travels_by_its_name_and_finds_its_options(named):
    algorithm = AlgorithmSection(loss=named("reinforce"), options={"factor": 2.0})
    loss = pickle.loads(pickle.dumps(PolicyLoss(algorithm)))
    found = loss(OUTPUTS, TRAINED)
    assert found.loss.item() == pytest.approx(2.0)
    assert found.metrics["loss/metrics/mine/advantage"].item() == pytest.approx(1.0)
    assert found.metrics["loss/policy"].item() == pytest.approx(2.0)


def test_what_a_loss_gives_outside_of_responses_is_not_looked_at(named):
    outputs = TokenOutputs(log_probs=torch.full((5,), -1.0), entropy=torch.ones(5))
    assert PolicyLoss(AlgorithmSection(loss=named("outside")))(outputs, TRAINED).loss.item() == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short_loss", r"per_token of shape \[\] for 5 tokens"),
        ("bare_loss", "a Tensor, not a TokenLosses"),
        ("number", "a float as per_token"),
        ("detached", "losses without a gradient"),
        ("metric", r"mine of shape \[\] for 5 tokens"),
    ],
)
def test_what_a_loss_returns_is_checked(named, name, says):
    with pytest.raises(DataError, match=rf"(?s)algorithm\.loss.*{says}"):
        PolicyLoss(AlgorithmSection(loss=named(name)))(OUTPUTS, TRAINED)
