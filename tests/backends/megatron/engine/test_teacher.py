"""A teacher: its log-probs against Hugging Face in every layout, and that nothing of the policy's depends on it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from anytron.algorithms.kl import with_distillation
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import EngineError
from anytron.config.algorithm import AlgorithmSection
from anytron.run.trainer.updates import UpdatePlan
from anytron_megatron.estimate.run import estimate
from tests.slow import slow_but

LAYOUTS = {
    "thd": {},
    "bshd": {"engine": {"sequence_format": "bshd"}},
    "tp2-sp": {"parallel": {"tensor_model_parallel_size": 2}},
    "pp2": {"parallel": {"pipeline_model_parallel_size": 2}},
    "pp2-interleaved": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}},
    },
    "cp2": {"parallel": {"context_parallel_size": 2}},
    "dp2": {"parallel": {"data_parallel_size": 2}},
}
FAMILIES = ("qwen2", "llama", "qwen3_moe", "deepseek_v3", "qwen3_next")
"""All of them have a larger vocabulary and other layers than the policy, which is a Qwen3; the first is tied."""
PURE = {"advantage": "none", "distillation_coefficient": 1.0}
LORA = {"lora": {"rank": 4, "targets": ["linear_qkv"]}}


def taught_by(directory, **sections):
    return {"teacher": {"path": str(directory)}, "algorithm": PURE, **sections}


def expected_log_probs(directory, batch):
    """Those of the response's tokens by Hugging Face, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        with torch.no_grad():
            scores = (model(tokens[None]).logits[0, :-1] / batch.temperature).log_softmax(-1)
        found.append(torch.cat([torch.zeros(1), scores.gather(1, tokens[1:, None])[:, 0]]))
    return torch.where(batch.response_mask, torch.cat(found), 0.0)


@pytest.fixture(scope="module")
def cold(recorded):
    """The recorded trajectories at a temperature, of which the teacher must know."""
    return replace(recorded, temperature=0.7)


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "thd", "bshd", "tp2-sp", "pp2-interleaved", "dp2"))
def test_log_probs_are_those_of_hugging_face_in_every_layout(layout, start_engine, tiny_family, cold):
    teacher = tiny_family("qwen2")
    with start_engine(**taught_by(teacher, **LAYOUTS[layout])) as (workers, updates, _):
        found = workers.score(cold, updates, "teacher")
    expected = expected_log_probs(teacher, cold)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert expected[cold.response_mask].std() > 0.1


@pytest.mark.parametrize("family", slow_but(FAMILIES[1:], "qwen3_moe"))
def test_a_teacher_of_another_family_scores_as_hugging_face(family, start_engine, tiny_family, cold):
    teacher = tiny_family(family)
    with start_engine(**taught_by(teacher)) as (workers, updates, _):
        found = workers.score(cold, updates, "teacher")
        torch.testing.assert_close(found, expected_log_probs(teacher, cold), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("model", [{}, LORA], ids=["weights", "adapters"])
def test_the_teacher_stays_while_the_policy_comes_nearer(model, start_engine, tiny_family, recorded):
    """Ten updates on the same responses, whose estimates of the divergence become smaller with their probabilities."""
    algorithm = AlgorithmSection(**PURE)
    teacher, sgd = tiny_family("qwen2"), {"name": "sgd", "lr": 0.3, "clip_grad": 0.0}
    with start_engine(**taught_by(teacher, model=model, optimizer=sgd)) as (workers, updates, _):
        assert updates.needs_old_log_probs
        first = batch = workers.with_scores(recorded, updates, reference=False, teacher=True)
        for _ in range(10):
            batch = replace(batch, advantages=torch.zeros(recorded.num_tokens))
            batch = next(updates.mini_batches(with_distillation(batch, algorithm), seed=0)).batch
            metrics = workers.update(batch, updates, PolicyLoss(algorithm))
            batch = workers.with_scores(batch, updates, reference=False, teacher=True)
    assert metrics["grad_norm"] > 0
    assert torch.equal(batch.teacher_log_probs, first.teacher_log_probs)
    # Tokens that the teacher finds more probable than the policy did have become so, and the other way round.
    wanted = (first.teacher_log_probs - first.old_log_probs)[recorded.response_mask]
    moved = (batch.old_log_probs - first.old_log_probs)[recorded.response_mask]
    assert torch.corrcoef(torch.stack([wanted, moved]))[0, 1] > 0.5


def test_the_policy_is_trained_as_without_a_teacher(follow, tiny_family):
    plain, taught = follow(), follow(**taught_by(tiny_family("qwen2")))
    assert torch.equal(plain.log_probs, taught.log_probs)
    assert plain.grad_norms == taught.grad_norms
    assert all(torch.equal(weight, taught.weights[name]) for name, weight in plain.weights.items())


def test_a_teacher_that_is_the_policy_is_noticed(start_engine, tiny_model, tiny_family, cold):
    """What an engine would give that forgets whom it is asked for."""
    with start_engine(**taught_by(tiny_model)) as (workers, updates, _):
        found = workers.score(cold, updates, "teacher")
        torch.testing.assert_close(found, workers.score(cold, updates, "policy"), atol=1e-5, rtol=0)
    assert (found - expected_log_probs(tiny_family("qwen2"), cold)).abs().max() > 0.1


@pytest.mark.parametrize("parallel", [{}, {"tensor_model_parallel_size": 2}], ids=["one", "tp2"])
def test_it_leaves_the_device_and_is_as_large_as_the_plan_says(parallel, ranks, tiny_model, tiny_family, cold):
    sections = taught_by(tiny_family("qwen2"), parallel=parallel, engine={"offload": ["teacher"]})
    workers, config = ranks.engine(tiny_model, **sections)
    updates = UpdatePlan.from_config(config, workers.topology[0])
    before = workers.score(cold, updates, "teacher")
    memory = workers.offload()
    (part,) = [part for part in estimate(config).parts if part.name == "teacher"]
    assert (part.when, part.exact) == ("training", True)
    assert memory["memory/offloaded_bytes"] == part.size * config.parallel.world_size
    assert torch.equal(workers.score(cold, updates, "teacher"), before)


def test_without_one_there_is_nobody_to_ask(start_engine, recorded):
    with start_engine() as (workers, updates, _), pytest.raises(EngineError, match="This engine has no teacher"):
        workers.score(recorded, updates, "teacher")


def test_weights_that_do_not_fit_are_an_error_of_the_teacher(tmp_path, ranks, tiny_model, tiny_family):
    directory = tmp_path / "teacher"
    directory.mkdir()
    config = json.loads((tiny_family("qwen2") / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    (directory / "model.safetensors").write_bytes((tiny_family("qwen2") / "model.safetensors").read_bytes())
    with pytest.raises(EngineError, match=str(directory)):
        ranks.engine(tiny_model, **taught_by(directory))
