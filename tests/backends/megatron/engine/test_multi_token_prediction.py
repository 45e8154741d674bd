"""Multi-token prediction: trained on responses, kept otherwise, and never in the policy's way.

The oracle is section 2.2 of the DeepSeek-V3 paper (https://arxiv.org/abs/2412.19437), written down with
transformers' decoder layers in double precision: one sequence at a time, no packing, no padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.base.errors import AnytronError
from anytron.sequences.batch import TokenOutputs
from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules, write_tiny_model

LAYERS, DEPTHS, HIDDEN = 2, 2, 32
COEFFICIENT, RATE = 1.0, 0.5
MODULES = ("model.layers.2.", "model.layers.3.")
COPIES = {prefix + name for prefix in MODULES for name in ("embed_tokens.weight", "shared_head.head.weight")}
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


@pytest.fixture(scope="module")
def model_with_modules(tmp_path_factory):
    """A tiny DeepSeek-V3 of two layers and two modules, which are named as in the published files."""
    directory = write_tiny_model(
        "deepseek_v3", tmp_path_factory.mktemp("mtp"), num_hidden_layers=LAYERS + DEPTHS, hidden_size=HIDDEN
    )
    turn_last_layers_into_prediction_modules(directory, DEPTHS)
    return directory


@pytest.fixture(scope="module")
def trajectories(recorded):
    return replace(recorded, temperature=0.8)


@dataclass(frozen=True)
class Outcome:
    """Metrics and weights after one update and after two."""

    metrics: list[dict[str, float]]
    weights: list[dict[str, torch.Tensor]]
    manifest: object


@pytest.fixture(scope="module")
def train(start_engine, model_with_modules, trajectories, policy_loss):
    def run(options=None, engine=None, **sections):
        # The loads that move the experts' bias are not what is tested here.
        transformer = {"moe_router_bias_update_rate": 0.0}
        options = {"mtp_loss_coefficient": COEFFICIENT, "mtp_detach": False, **(options or {})}
        engine = {"options": {**options, "transformer": transformer}, **(engine or {})}
        with start_engine(
            model={"path": str(model_with_modules)},
            optimizer={"name": "sgd", "lr": RATE, "clip_grad": 0.0},
            engine={"max_tokens_per_micro_batch": 24, "distributed_optimizer": False, **engine},
            **sections,
        ) as (workers, updates, output):
            metrics, weights = [], []
            for name in ("one", "two"):
                metrics.append(workers.update(trajectories, updates, policy_loss))
                manifest = workers.export_weights(str(output / name))
                weights.append(load_file(output / name))
            workers.save_hf(str(output / "hf"))
            return Outcome(metrics, [*weights, load_file(output / "hf" / "model.safetensors")], manifest)

    return run


@pytest.fixture(scope="module")
def jointly(train):
    """One rank, gradients of the modules' loss reaching the whole model."""
    return train()


@pytest.fixture(scope="module")
def apart(train):
    """One rank, gradients kept in the modules (the default), padded."""
    return train({"mtp_detach": True}, engine={"sequence_format": "bshd"})


def by_the_paper(directory, batch, policy_loss, tmp_path, *, detach, misplaced=0):
    """One SGD step: (the modules' loss, weights after it)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory,
        num_hidden_layers=LAYERS + DEPTHS,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model.model.config.num_hidden_layers = LAYERS  # its forward stops there; the layers behind are the modules'
    stored = load_file(directory / "model.safetensors")
    own = {
        name: tensor.double().requires_grad_() for name, tensor in stored.items() if name.endswith(OWN)
        and "layers.0" not in name and "layers.1" not in name
    }  # fmt: skip

    def norm(x, weight):
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)

    def shared(tensor):
        return tensor.detach() if detach else tensor

    scores, entropies, predicted = [], [], [[] for _ in range(DEPTHS)]
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        hidden = model.model(tokens[None]).last_hidden_state
        every = (model.lm_head(hidden)[0] / batch.temperature).log_softmax(-1)
        zero = every.new_zeros(1)
        scores.append(torch.cat([zero, every[:-1].gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(every.exp() * every).sum(-1)[:-1]]))
        hidden = shared(hidden)
        for depth in range(1, DEPTHS + 1):
            length = len(tokens) - depth  # equation 21: i from 1 to T - k
            if length <= 0:
                predicted[depth - 1].append(every.new_zeros(len(tokens)))
                hidden = hidden[:, :0]
                continue
            prefix = f"model.layers.{LAYERS + depth - 1}."
            embedded = shared(model.model.embed_tokens.weight)[tokens[depth:]][None]
            joined = torch.cat(
                [norm(embedded, own[prefix + "enorm.weight"]), norm(hidden[:, :length], own[prefix + "hnorm.weight"])],
                -1,
            )
            joined = joined @ own[prefix + "eh_proj.weight"].t()
            positions = torch.arange(length)[None]
            causal = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            hidden = model.model.layers[LAYERS + depth - 1](
                joined, position_embeddings=model.model.rotary_emb(joined, positions), attention_mask=causal,
                position_ids=positions,
            )  # fmt: skip
            hidden = norm(hidden, own[prefix + "shared_head.norm.weight"])
            logits = hidden[0] @ shared(model.lm_head.weight).t() / batch.temperature
            wanted = tokens[depth + 1 - misplaced :][: length - 1]
            chosen = logits[: length - 1].log_softmax(-1).gather(1, wanted[:, None])[:, 0]
            predicted[depth - 1].append(torch.cat([every.new_zeros(depth + 1), chosen]))
    modules = -sum((batch.loss_weights * torch.cat(depth)).sum() for depth in predicted) / DEPTHS
    outputs = policy_loss(TokenOutputs(torch.cat(scores), torch.cat(entropies)), batch)
    (outputs.loss + COEFFICIENT * modules).backward()
    with torch.no_grad():
        for parameter in [*model.parameters(), *own.values()]:
            if parameter.grad is not None:
                parameter.sub_(RATE * parameter.grad)
    model.config.num_hidden_layers = LAYERS + DEPTHS
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {name: tensor.detach() for name, tensor in own.items()}
    return modules.item(), weights


@pytest.mark.parametrize("detach", [False, True])
def test_an_update_is_the_papers(detach, request, model_with_modules, trajectories, policy_loss, tmp_path):
    ours = request.getfixturevalue("apart" if detach else "jointly")
    loss, expected = by_the_paper(model_with_modules, trajectories, policy_loss, tmp_path, detach=detach)
    assert ours.metrics[0]["mtp/loss"] == pytest.approx(loss, rel=1e-5)
    before, after = load_file(model_with_modules / "model.safetensors"), ours.weights[0]
    assert expected.keys() <= after.keys() | COPIES
    moves = {name: (after[name] - before[name]).abs().max().item() for name in after}
    for name in expected.keys() - COPIES:
        stepped, wanted = after[name].double() - before[name], expected[name].double() - before[name]
        torch.testing.assert_close(stepped, wanted, atol=5e-7, rtol=1e-3, msg=f"{name}, which moves by {moves[name]}")
    assert min(move for name, move in moves.items() if name.startswith(MODULES) and name.endswith(OWN)) > 1e-4


def test_a_loss_on_the_wrong_tokens_is_noticed(apart, model_with_modules, trajectories, policy_loss, tmp_path):
    loss, _ = by_the_paper(model_with_modules, trajectories, policy_loss, tmp_path, detach=True, misplaced=1)
    assert abs(apart.metrics[0]["mtp/loss"] - loss) > 1e-2


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"tensor_model_parallel_size": 2}},
        {"parallel": {"pipeline_model_parallel_size": 2}, "engine": {"sequence_format": "bshd"}},
        {"parallel": {"context_parallel_size": 2}, "engine": {"recompute": "full"}},
        {
            "parallel": {"context_parallel_size": 2, "expert_model_parallel_size": 2},
            "engine": {"sequence_format": "bshd"},
        },
    ],
    ids=["tp2-sp", "pp2-bshd", "cp2-recompute", "cp2-ep2-bshd"],
)
def test_a_split_agrees_with_one_rank(sections, jointly, train):
    other = train(**sections)
    for one, two in zip(jointly.metrics, other.metrics, strict=True):
        assert two["mtp/loss"] == pytest.approx(one["mtp/loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    for one, two in zip(jointly.weights, other.weights, strict=True):
        assert one.keys() == two.keys()
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, atol=1e-5, rtol=0, msg=name)


def test_the_modules_are_declared_to_the_rollout_engine(jointly, model_with_modules):
    own = load_file(model_with_modules / "model.safetensors").keys() - COPIES
    assert jointly.manifest.checksums.keys() == own
    assert jointly.manifest.optional == {name for name in own if name.startswith(MODULES)}


def test_a_model_directory_has_the_copies_that_it_was_read_with(jointly, model_with_modules):
    saved, exported = jointly.weights[2], jointly.weights[1]
    assert saved.keys() == load_file(model_with_modules / "model.safetensors").keys()
    for name, tensor in exported.items():
        assert torch.equal(saved[name], tensor), name
    for name in COPIES:
        source = "lm_head.weight" if name.endswith("head.weight") else "model.embed_tokens.weight"
        assert torch.equal(saved[name], exported[source])


def test_gradients_stay_in_the_modules_unless_they_are_let_out(apart, jointly, train):
    without = train({"mtp_loss_coefficient": 0.0})
    assert "mtp/loss" not in without.metrics[0]
    for name, weight in without.weights[0].items():
        torch.testing.assert_close(apart.weights[0][name], weight, atol=1e-6, rtol=0, msg=name)
    shared = "model.embed_tokens.weight"
    assert (jointly.weights[0][shared] - without.weights[0][shared]).abs().max() > 1e-4


def test_without_a_coefficient_the_modules_are_kept_and_follow_what_they_share(train, model_with_modules):
    outcome = train({"mtp_loss_coefficient": 0.0}, parallel={"pipeline_model_parallel_size": 2})
    stored, saved = load_file(model_with_modules / "model.safetensors"), outcome.weights[2]
    assert stored.keys() == saved.keys()
    assert outcome.manifest.optional == frozenset()
    assert not any(name.startswith(MODULES) for name in outcome.weights[1])
    for name in stored:
        if name.startswith(MODULES) and name not in COPIES:
            assert torch.equal(saved[name], stored[name]), name
    assert torch.equal(saved["model.layers.2.shared_head.head.weight"], saved["lm_head.weight"])
    assert torch.equal(saved["model.layers.3.embed_tokens.weight"], saved["model.embed_tokens.weight"])
    assert not torch.equal(saved["lm_head.weight"], stored["lm_head.weight"])


def test_modules_that_the_files_lack_are_not_invented(start_engine, model_with_modules, tmp_path):
    weights = load_file(model_with_modules / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.3.")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model_with_modules / "config.json").read_bytes())
    with (
        pytest.raises(AnytronError, match=r"(?s)weights do not match.*tensors are missing: model\.layers\.3\."),
        start_engine(model={"path": str(tmp_path)}, engine={"options": {"mtp_loss_coefficient": 0.1}}),
    ):
        pass
