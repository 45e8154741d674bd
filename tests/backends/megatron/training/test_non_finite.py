"""A NaN or an infinity on one rank: no rank changes anything; and where such a number arises."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.algorithms.losses import ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.config.algorithm import AlgorithmSection

ADAM = {"name": "adam", "lr": 1e-3}
LAYOUTS = {
    "sgd": {},
    "dp2": {"parallel": {"data_parallel_size": 2}},
    "dp2-distributed": {
        "parallel": {"data_parallel_size": 2},
        "optimizer": ADAM,
        "engine": {"distributed_optimizer": True},
    },
    "dp2-bfloat16": {"parallel": {"data_parallel_size": 2}, "optimizer": ADAM, "model": {"dtype": "bfloat16"}},
    "dp2-bfloat16-distributed": {
        "parallel": {"data_parallel_size": 2},
        "optimizer": ADAM,
        "model": {"dtype": "bfloat16"},
        "engine": {"distributed_optimizer": True},
    },
    "tp2": {"parallel": {"tensor_model_parallel_size": 2}, "optimizer": ADAM},
    "pp2": {"parallel": {"pipeline_model_parallel_size": 2}, "optimizer": ADAM},
    "ep2-bias": {
        "parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2},
        "optimizer": ADAM,
        "engine": {"options": {"transformer": {"moe_router_bias_update_rate": 0.01}}},
    },
}
LOSSES = """
import torch
from anytron.algorithms.contract import TokenLosses
from anytron.algorithms.losses import ppo_clip

def infinite(tokens, algorithm):
    chosen = tokens.advantages == torch.tensor(ADVANTAGE)
    return TokenLosses(ppo_clip(tokens, algorithm).per_token + torch.where(chosen, torch.inf, 0.0))

def steep(tokens, algorithm):
    found = ppo_clip(tokens, algorithm).per_token
    return TokenLosses(found + torch.sqrt(torch.sum(0 * tokens.log_probs)))
"""


@pytest.fixture(scope="module")
def loss_of(tmp_path_factory, recorded):
    file = tmp_path_factory.mktemp("losses") / "mine.py"
    file.write_text(LOSSES.replace("ADVANTAGE", repr(recorded.advantages[recorded.response_mask][0].item())))
    return lambda name: PolicyLoss(AlgorithmSection(loss=f"{file}:{name}"))


@pytest.fixture(scope="module")
def poisoned(recorded):
    """One sequence of eight has NaN advantages: one replica of two sees it."""
    sequence = torch.repeat_interleave(torch.arange(8), recorded.lengths)
    return dataclasses.replace(recorded, advantages=recorded.advantages.masked_fill(sequence == 3, math.nan))


def once_more(start_engine, sections, batches, loss, method="update"):
    """Do updates; give their metrics, and the policy's weights at the end."""
    with start_engine(**sections) as (workers, updates, output):
        metrics = [getattr(workers, method)(batch, updates, loss) for batch in batches]
        if method == "update_critic":
            workers.save_critic(str(output / "critic"))
            weights = {k: v for file in (output / "critic").glob("*.safetensors") for k, v in load_file(file).items()}
        else:
            workers.export_weights(str(output / "after.safetensors"))
            weights = load_file(output / "after.safetensors")
    return metrics, weights


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_with_a_nan_on_one_rank_changes_nothing(
    layout, start_engine, recorded, poisoned, policy_loss, tiny_family
):
    sections = LAYOUTS[layout]
    if layout == "ep2-bias":
        sections = {**sections, "model": {"path": str(tiny_family("deepseek_v3"))}}
    (first, bad, third), after = once_more(start_engine, sections, [recorded, poisoned, recorded], policy_loss)
    (one, two), expected = once_more(start_engine, sections, [recorded, recorded], policy_loss)
    assert (first["update/skipped"], bad["update/skipped"], third["update/skipped"]) == (0, 1, 0)
    assert math.isnan(bad["grad_norm"])
    # The update after it is bit for bit the one that would have come: weights, optimizer, schedule, biases.
    assert (first, third) == (one, two)
    for name, weight in expected.items():
        assert torch.equal(after[name], weight), name


@pytest.mark.slow
def test_expert_biases_that_are_not_put_back_are_noticed(
    start_engine, recorded, poisoned, policy_loss, tiny_family, write_extension
):
    write_extension("torch.nn:Module.buffers", "lambda original: lambda self, recurse=True: iter(())")
    sections = {**LAYOUTS["ep2-bias"], "model": {"path": str(tiny_family("deepseek_v3"))}}
    (_, bad), after = once_more(start_engine, sections, [recorded, poisoned], policy_loss)
    _, expected = once_more(start_engine, sections, [recorded], policy_loss)
    assert bad["update/skipped"] == 1
    changed = {name for name, weight in expected.items() if not torch.equal(after[name], weight)}
    assert {name.rpartition(".")[2] for name in changed} == {"e_score_correction_bias"}


def test_an_infinite_loss_with_finite_gradients_counts_too(start_engine, recorded, policy_loss, loss_of):
    sections = {"parallel": {"data_parallel_size": 2}}
    (bad,), after = once_more(start_engine, sections, [recorded], loss_of("infinite"))
    _, before = once_more(start_engine, sections, [], None)
    assert bad["update/skipped"] == 1
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


def test_the_critic_is_left_as_it_was(start_engine, recorded):
    sections = {
        "critic": {"optimizer": ADAM},
        "algorithm": {"advantage": "gae"},
        "parallel": {"data_parallel_size": 2},
    }
    generator = torch.Generator().manual_seed(3)
    returns = torch.randn(recorded.num_tokens, generator=generator)
    good = dataclasses.replace(recorded, values=torch.zeros(recorded.num_tokens), returns=returns)
    bad = dataclasses.replace(good, returns=torch.where(torch.arange(len(returns)) == 30, torch.inf, returns))
    (_, skipped, third), after = once_more(start_engine, sections, [good, bad, good], ValueLoss(), "update_critic")
    (_, two), expected = once_more(start_engine, sections, [good, good], ValueLoss(), "update_critic")
    assert skipped["critic/update/skipped"] == 1
    assert third == two
    for name, weight in expected.items():
        assert torch.equal(after[name], weight), name


@pytest.fixture(scope="module")
def inspect(start_engine):
    def run(batch, loss, sequence_format="thd", micro_batch=24, **sections):
        engine = {"max_tokens_per_micro_batch": micro_batch, "sequence_format": sequence_format}
        with start_engine(engine=engine, **sections) as (workers, updates, _):
            shares = updates.micro_batches(batch, 1)[0]
            found = workers.group.call("inspect_update", [share.batch for share in shares], loss, "policy")[0]
            return found, shares

    return run


OVERFLOWING = 5  # a token


@pytest.fixture(scope="module")
def overflowing_model(tiny_model, tmp_path_factory):
    """A model whose first layer's MLP overflows for one token: it alone points so far into one direction."""
    directory = tmp_path_factory.mktemp("overflowing") / "model"
    shutil.copytree(tiny_model, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][OVERFLOWING] = 0.0
    weights["model.embed_tokens.weight"][OVERFLOWING, 7] = 1000.0
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"][:, 7] = 4.5e18
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return {"path": str(directory)}


@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_an_overflow_is_found_in_its_module_and_at_its_token(
    inspect, recorded, policy_loss, overflowing_model, sequence_format
):
    found, shares = inspect(recorded, policy_loss, model=overflowing_model, sequence_format=sequence_format)
    assert found.weights == ()
    assert (found.first.place, found.first.what) == ("decoder.layers.0.mlp.activation_func", "output")
    sequence = shares[found.first.micro_batch].sequences[found.first.sequence]
    token = int(recorded.lengths[:sequence].sum()) + found.first.token
    assert recorded.tokens[token] == OVERFLOWING
    before = [int(index) for share in shares[: found.first.micro_batch] for index in share.sequences]
    earlier = recorded.select(torch.tensor(before)).tokens if before else torch.tensor([])
    assert OVERFLOWING not in earlier


def test_its_token_is_that_of_the_sequence_where_a_prompt_is_shared(inspect, recorded, policy_loss, overflowing_model):
    prompt, answers = [10, 11, 12, 13, 14, 15, 16], ([20], [21, 22], [23, OVERFLOWING, 24])
    tokens = torch.tensor([token for answer in answers for token in (*prompt, *answer)])
    lengths = torch.tensor([len(prompt) + len(answer) for answer in answers])
    written = torch.cat([torch.arange(length) >= len(prompt) for length in lengths.tolist()])
    values = {name: torch.zeros(len(tokens)) for name in ("old_log_probs", "rollout_log_probs", "reference_log_probs")}
    values |= {name: written / written.sum() for name in ("advantages", "loss_weights", "token_shares")}
    batch = dataclasses.replace(recorded, lengths=lengths, tokens=tokens, response_mask=written, **values)
    found, shares = inspect(batch, policy_loss, model=overflowing_model, sequence_format="thd", micro_batch=4096)
    assert [share.sequences for share in shares] == [(0, 1, 2)]
    assert (found.first.place, found.first.sequence) == ("decoder.layers.0.mlp.activation_func", 2)
    assert found.first.token == len(prompt) + 1


def test_weights_that_are_broken_already_are_named(start_engine, recorded, policy_loss):
    with start_engine(optimizer={"name": "sgd", "lr": 3e38, "clip_grad": 0.0}) as (workers, updates, _):
        steep = dataclasses.replace(recorded, advantages=1e3 * recorded.advantages)
        assert workers.update(steep, updates, policy_loss)["update/skipped"] == 0
        assert workers.update(recorded, updates, policy_loss)["update/skipped"] == 1
        batches = [share.batch for share in updates.micro_batches(recorded, 1)[0]]
        found = workers.group.call("inspect_update", batches, policy_loss, "policy")[0]
    assert any(name.startswith("decoder.layers.") and name.endswith(".weight") for name in found.weights)
    assert found.first is not None


def test_a_loss_is_told_from_its_gradient_and_from_the_model(inspect, recorded, poisoned, policy_loss, loss_of):
    found, _ = inspect(poisoned, policy_loss)
    assert (found.first.place, found.first.what, found.first.value) == ("loss", "loss", "nan")
    found, _ = inspect(recorded, loss_of("infinite"))
    assert (found.first.place, found.first.value) == ("loss", "inf")
    found, _ = inspect(recorded, loss_of("steep"))
    assert (found.first.place, found.first.what) == ("loss (by log_probs)", "gradient of its input")
    found, _ = inspect(recorded, policy_loss)
    assert found.first is None
    assert found.metrics["loss/policy"] == pytest.approx(found.metrics["loss/total"], abs=10)
    json.dumps(dataclasses.asdict(found))
