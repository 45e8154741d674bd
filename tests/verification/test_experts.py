"""Load-balancing losses and biases of routers that are compared by hand, and with transformers' own function."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from anytron.proof.checks import Inapplicable
from anytron.proof.verification.experts import (
    compare_biases,
    expected_balance,
    loads_of,
    observed_routers,
    require_experts,
)
from anytron.proof.verification.hugging_face import load_model, sequence_logits
from anytron.sequences.batch import RaggedBatch
from anytron_conformance.tiny_models import write_tiny_model

TOKENS = 13


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def sequence():
    return RaggedBatch(
        lengths=torch.tensor([TOKENS]),
        tokens=torch.randint(16, (TOKENS,), generator=torch.Generator().manual_seed(0)),
        response_mask=torch.ones(TOKENS, dtype=torch.bool),
    )


def test_the_loss_and_its_gradients_are_those_of_transformers(directory, sequence):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = load_model(directory, None, torch.float32)
    out = model(sequence.tokens[None], use_cache=False, output_router_logits=True)
    chosen = model.config.num_experts_per_tok
    losses = [load_balancing_loss_func((one,), model.config.num_experts, chosen) / chosen for one in out.router_logits]
    torch.stack(losses).sum().backward()
    found = expected_balance(directory, torch.float32, sequence)
    assert found.loss == pytest.approx(float(torch.stack(losses).detach().mean()))
    gate = "model.layers.1.mlp.gate.weight"
    torch.testing.assert_close(found.gradients[gate], dict(model.named_parameters())[gate].grad)


def test_each_token_is_counted_for_each_of_its_experts(directory, sequence):
    twice = sequence.select(torch.tensor([0, 0]))
    model = load_model(directory, None, torch.float32)
    once, double = (loads_of(directory, torch.float32, batch) for batch in (sequence, twice))
    assert [int(load.sum()) for load in once] == [TOKENS * model.config.num_experts_per_tok] * len(once)
    assert all(torch.equal(2 * one, two) for one, two in zip(once, double, strict=True))


def test_routers_are_no_longer_observed_afterwards(directory, sequence):
    model = load_model(directory, None, torch.float32)
    with observed_routers(model) as layers:
        sequence_logits(model, sequence)
    seen = len(layers)
    sequence_logits(model, sequence)
    assert seen == len(layers) == model.config.num_hidden_layers


def test_a_model_whose_routers_are_not_known_is_not_compared():
    config = SimpleNamespace(get_text_config=dict)
    model = SimpleNamespace(modules=lambda: [torch.nn.Linear(2, 2)], config=config)
    with pytest.raises(Inapplicable, match="unknown form"), observed_routers(model):
        pass


@pytest.mark.parametrize(
    ("lora", "dtype", "says"),
    [(None, "bfloat16", "other experts in bfloat16"), ({"rank": 4}, "float32", "adapters only")],
)
def test_what_cannot_be_compared_is_skipped(directory, monkeypatch, lora, dtype, says):
    monkeypatch.setattr("anytron.proof.verification.experts.model_directory", lambda config: directory)
    config = SimpleNamespace(model=SimpleNamespace(lora=lora, dtype=dtype))
    with pytest.raises(Inapplicable, match=says):
        require_experts(config, exact=True)


LOADS = [torch.tensor([5, 1, 2, 4]), torch.tensor([3, 3, 6, 0])]
RIGHT = [torch.tensor([-1.0, 1.0, 1.0, -1.0]), torch.tensor([0.0, 0.0, -1.0, 1.0])]


def biases(*, first=1e-3, second=1e-3, dtype=torch.float32):
    start = [torch.tensor([0.3, -0.4, 0.01, 2.0]), torch.tensor([0.1, 0.7, -0.2, 5.0])]
    once = [(one + first * sign).to(dtype).float() for one, sign in zip(start, RIGHT, strict=True)]
    return [start, once, [(one + second * sign).to(dtype).float() for one, sign in zip(once, RIGHT, strict=True)]]


def test_biases_move_towards_equal_loads():
    result = compare_biases("check", biases(), LOADS)
    assert result.status == "passed", result.detail
    assert result.detail == "biases of 2 routers in 2 updates move by 0.001 towards equal loads"


@pytest.mark.parametrize(
    ("found", "loads", "says"),
    [
        (biases(dtype=torch.bfloat16), LOADS, "must move by one amount"),
        (biases(first=2e-3), LOADS, "in update 1 are off by"),
        (biases(), [LOADS[0].roll(1), LOADS[1]], "router 0's in update 1 are off by 2 of it"),
        (biases(first=0.0, second=0.0), LOADS, "do not move"),
    ],
    ids=["half-precision", "a-pass-before-the-first", "other-loads", "lost"],
)
def test_biases_that_move_otherwise_fail(found, loads, says):
    result = compare_biases("check", found, loads)
    assert result.status == "failed"
    assert says in result.detail


def test_without_loads_the_amounts_are_compared():
    assert compare_biases("check", biases(), ()).status == "passed"
    assert compare_biases("check", biases(dtype=torch.bfloat16), ()).status == "failed"
