"""The critic: its values against Hugging Face, its updates against one rank, what it leaves."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.algorithms.losses import ValueLoss
from anytron.base.errors import AnytronError, EngineError
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import TokenOutputs
from tests.slow import slow_but

SPLITS = {
    "bshd": {"engine": {"sequence_format": "bshd"}},
    "recompute": {"engine": {"recompute": "full", "max_tokens_per_micro_batch": 16}},
    "tp2-sp": {"parallel": {"tensor_model_parallel_size": 2}},
    "tp2": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": False}},
    "pp2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "pp2-interleaved": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}},
    },
    "cp2": {"parallel": {"context_parallel_size": 2}},
    "dp2": {"parallel": {"data_parallel_size": 2}},
}
SGD = {"name": "sgd", "lr": 0.01, "clip_grad": 0.0}
PPO = {"algorithm": {"advantage": "gae"}}


def with_head(model, directory, scale=0.1):
    """A copy of a model's directory, with a value head beside the trunk."""
    shutil.copytree(model, directory)
    hidden = json.loads((directory / "config.json").read_text())["hidden_size"]
    head = scale * torch.randn(1, hidden, generator=torch.Generator().manual_seed(5))
    save_file({"value_head.weight": head}, directory / "value_head.safetensors")
    return directory


@pytest.fixture(scope="module")
def start_model(tiny_model, tmp_path_factory):
    return with_head(tiny_model, tmp_path_factory.mktemp("critic") / "start")


@pytest.fixture(scope="module")
def tied_model(tiny_model, tmp_path_factory):
    """The same with one weight for embedding and output layer."""
    directory = tmp_path_factory.mktemp("tied") / "start"
    with_head(tiny_model, directory)
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return directory


@dataclasses.dataclass(frozen=True)
class Learnt:
    """What a critic says, how it learns, what it says then, and what it leaves."""

    values: torch.Tensor
    grad_norms: list[float]
    losses: list[float]
    values_after: torch.Tensor
    trunk: dict[str, torch.Tensor]
    head: torch.Tensor


@pytest.fixture(scope="module")
def learn(ranks, recorded, tiny_model, start_model, tmp_path_factory):
    """Ask a critic for values of recorded trajectories, and do three updates with plain SGD."""

    def run(critic=start_model, **sections):
        section = {"path": str(critic), "optimizer": SGD}
        workers, config = ranks.engine(tiny_model, critic=section, **PPO, **sections)
        updates = UpdatePlan.from_config(config, workers.topology[0])
        batch = workers.with_values(recorded, updates)
        returns = batch.values + torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3))
        batch = dataclasses.replace(batch, returns=returns)
        metrics = [workers.update_critic(batch, updates, ValueLoss()) for _ in range(3)]
        directory = tmp_path_factory.mktemp("learnt") / "critic"
        workers.save_critic(str(directory))
        files = [file for file in directory.glob("*.safetensors") if file.name != "value_head.safetensors"]
        return Learnt(
            values=batch.values,
            grad_norms=[step["critic/grad_norm"] for step in metrics],
            losses=[step["critic/loss"] for step in metrics],
            values_after=workers.with_values(recorded, updates).values,
            trunk={name: tensor for file in files for name, tensor in load_file(file).items()},
            head=load_file(directory / "value_head.safetensors")["value_head.weight"],
        )

    return run


@pytest.fixture(scope="module")
def one_rank(learn):
    return learn()


def differences(one, other):
    """Largest differences: of values and weights absolute, of gradient norms relative."""
    weights = [(one.trunk[name] - other.trunk[name]).abs().max() for name in one.trunk]
    return {
        "values": max((one.values - other.values).abs().max(), (one.values_after - other.values_after).abs().max()),
        "grad_norm": max(abs(a - b) / a for a, b in zip(one.grad_norms, other.grad_norms, strict=True)),
        "weights": max(*weights, (one.head - other.head).abs().max()),
    }


def expected_values(directory, batch, trunk=None, head=None):
    """Hidden states behind the final norm times the head, by Hugging Face, one place later."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    if trunk is not None:
        model.load_state_dict({name.removeprefix("model."): t for name, t in trunk.items() if name != "lm_head.weight"})
    head = load_file(directory / "value_head.safetensors")["value_head.weight"] if head is None else head
    expected = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        with torch.no_grad():
            behind = model(tokens[None]).last_hidden_state[0] @ head[0]
        expected.append(torch.cat([torch.zeros(1), behind[:-1]]))
    return torch.cat(expected)


def test_values_are_those_of_hugging_faces_hidden_states(one_rank, recorded, start_model):
    before = expected_values(start_model, recorded)
    torch.testing.assert_close(one_rank.values, before, atol=1e-5, rtol=1e-5)
    assert before.std() > 0.1
    after = expected_values(start_model, recorded, one_rank.trunk, one_rank.head)
    torch.testing.assert_close(one_rank.values_after, after, atol=1e-5, rtol=1e-5)


def test_updates_are_those_of_autograd(one_rank, recorded, start_model):
    """The same three updates of Hugging Face's model by torch's SGD."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(start_model, dtype=torch.float32)
    head = torch.nn.Parameter(load_file(start_model / "value_head.safetensors")["value_head.weight"])
    parameters = [*model.parameters(), head]
    returns = one_rank.values + torch.randn(recorded.num_tokens, generator=torch.Generator().manual_seed(3))
    batch = dataclasses.replace(recorded, values=one_rank.values, returns=returns)
    optimizer, norms, losses = torch.optim.SGD(parameters, lr=SGD["lr"]), [], []
    for _ in range(3):
        behind = [
            model(tokens[None]).last_hidden_state[0] @ head[0] for tokens in batch.tokens.split(batch.lengths.tolist())
        ]
        values = torch.cat([torch.cat([torch.zeros(1), one[:-1]]) for one in behind])
        optimizer.zero_grad()
        loss = ValueLoss()(TokenOutputs(values=values), batch).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, torch.inf).item())
        losses.append(loss.item())
        optimizer.step()

    assert one_rank.grad_norms == pytest.approx(norms, rel=1e-4)
    assert one_rank.losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(one_rank.head, head.detach(), atol=1e-5, rtol=0)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(one_rank.trunk[f"model.{name}"], weight, atol=1e-5, rtol=0)


def test_all_of_the_trunk_learns_and_the_output_layer_stays(one_rank, start_model):
    before = load_file(start_model / "model.safetensors")
    assert set(before) == set(one_rank.trunk)
    still = [name for name in before if torch.equal(before[name], one_rank.trunk[name])]
    assert still == ["lm_head.weight"]
    assert one_rank.losses[-1] < one_rank.losses[0]


@pytest.mark.some(2)
@pytest.mark.parametrize("split", slow_but(SPLITS, "bshd", "recompute", "tp2-sp", "pp2-interleaved", "dp2"))
def test_a_split_agrees_with_one_rank(split, one_rank, learn):
    found = differences(one_rank, learn(**SPLITS[split]))
    assert found["values"] <= 1e-5, found
    assert found["grad_norm"] <= 1e-5, found
    assert found["weights"] <= 1e-6, found


@pytest.mark.slow
def test_an_embedding_tied_to_the_output_layer_is_one_weight_on_two_stages(tied_model, learn):
    one, two = learn(tied_model), learn(tied_model, **SPLITS["pp2"])
    found = differences(one, two)
    assert set(one.trunk) == set(two.trunk)
    assert max(found.values()) <= 1e-5, found


@pytest.fixture(scope="module")
def balance(ranks, recorded, tiny_family):
    """Three updates of a critic that is a mixture of experts, each sequence a micro-batch of its own."""

    def run(**sections):
        fields = {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 0.01}
        engine = {"max_tokens_per_micro_batch": 1, "options": {"transformer": fields}}
        section = {"optimizer": SGD}
        workers, config = ranks.engine(tiny_family("qwen3_moe"), critic=section, engine=engine, **PPO, **sections)
        updates = UpdatePlan.from_config(config, workers.topology[0])
        batch = workers.with_values(recorded, updates)
        batch = dataclasses.replace(batch, returns=batch.advantages)
        return [workers.update_critic(batch, updates, ValueLoss()) for _ in range(3)]

    return run


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "parallel",
    [
        {"data_parallel_size": 2, "expert_model_parallel_size": 2},
        pytest.param({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["dp2-ep2", "tp2-sp-ep2"],
)
def test_a_critic_of_experts_is_balanced_and_agrees_with_one_rank(parallel, balance):
    one, other = balance(), balance(parallel=parallel)
    assert all(step["critic/moe/load_balancing_loss"] > 0.5 for step in one)
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=2e-5, abs=1e-6)


@pytest.mark.slow
def test_a_gradient_that_is_summed_twice_is_noticed(one_rank, learn, write_extension):
    """Values are gathered from sequence parallelism as if every rank had a part of their gradient."""
    write_extension(
        "anytron_megatron.critic:gather_from_sequence_parallel_region",
        "lambda original: lambda x, tensor_parallel_output_grad: original(x, tensor_parallel_output_grad=True)",
    )
    found = differences(one_rank, learn(**SPLITS["tp2-sp"]))
    assert found["grad_norm"] > 1e-1, found
    assert found["weights"] > 1e-3, found


def test_a_head_begins_as_zero_and_the_policy_knows_nothing_of_it(ranks, recorded, tiny_model):
    plain, config = ranks.engine(tiny_model)
    updates = UpdatePlan.from_config(config, plain.topology[0])
    log_probs = plain.score(recorded, updates, "policy")
    section = {"optimizer": SGD}
    workers, _ = ranks.engine(tiny_model, critic=section, **PPO)
    batch = workers.with_values(recorded, updates)
    assert not batch.values.any()
    workers.update_critic(dataclasses.replace(batch, returns=torch.ones(batch.num_tokens)), updates, ValueLoss())
    assert workers.with_values(recorded, updates).values.any()
    assert torch.equal(workers.score(recorded, updates, "policy"), log_probs)


def test_what_is_saved_is_gone_on_from(ranks, recorded, tiny_model, start_model, tmp_path):
    pipeline = SPLITS["pp2"]
    workers, config = ranks.engine(tiny_model, critic={"path": str(start_model)}, **PPO, **pipeline)
    updates = UpdatePlan.from_config(config, workers.topology[0])
    batch = workers.with_values(recorded, updates)
    workers.update_critic(dataclasses.replace(batch, returns=batch.values + 1), updates, ValueLoss())
    left = workers.with_values(recorded, updates).values
    workers.save_critic(str(tmp_path / "critic"))
    again, _ = ranks.engine(tiny_model, critic={"path": str(tmp_path / "critic")}, **PPO)
    torch.testing.assert_close(again.with_values(recorded, updates).values, left, atol=1e-5, rtol=0)


def test_bfloat16_and_the_distributed_optimizer_keep_the_head_in_float32(ranks, recorded, tiny_model, tmp_path):
    section = {"optimizer": {"name": "adam", "lr": 1e-3}}
    workers, config = ranks.engine(
        tiny_model,
        critic=section,
        model={"dtype": "bfloat16"},
        engine={"distributed_optimizer": True},
        optimizer={"name": "adam"},
        parallel={"data_parallel_size": 2},
        **PPO,
    )
    updates = UpdatePlan.from_config(config, workers.topology[0])
    batch = workers.with_values(recorded, updates)
    batch = dataclasses.replace(batch, returns=torch.ones(batch.num_tokens))
    losses = [workers.update_critic(batch, updates, ValueLoss(0.0))["critic/loss"] for _ in range(20)]
    workers.save_critic(str(tmp_path / "critic"))
    head = load_file(tmp_path / "critic" / "value_head.safetensors")["value_head.weight"]
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.5 * losses[0]
    assert head.dtype is torch.float32
    assert not torch.equal(head, head.bfloat16().float())


def test_without_a_critic_there_are_no_values(start_engine, recorded):
    with start_engine() as (workers, updates, _), pytest.raises(AnytronError, match="This engine has no critic"):
        workers.with_values(recorded, updates)


def test_a_head_of_another_model_is_refused(ranks, tiny_model, start_model, tmp_path):
    shutil.copytree(start_model, tmp_path / "critic")
    save_file({"value_head.weight": torch.zeros(1, 7)}, tmp_path / "critic" / "value_head.safetensors")
    with pytest.raises(EngineError, match=r"(?s)does not match.*\(1, 7\), but the critic's head .*shape \(1, 32\)"):
        ranks.engine(tiny_model, critic={"path": str(tmp_path / "critic")}, **PPO)
