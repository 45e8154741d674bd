"""With company-invariant kernels, generation gives training's log-probs to the bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.config.running import EngineSection
from anytron.proof.verification.weights import stored_weights
from anytron.run.trainer.updates import UpdatePlan
from anytron.task.data.model_files import as_known, has_experts, logits_fields
from anytron_conformance.tiny_models import CONFIGS, write_tiny_model
from anytron_rollout.checks import SAME_EXPERTS
from anytron_rollout.invariant_experts import ROUTERS
from tests.backends.megatron.families.layouts import ONE, Layout
from tests.backends.megatron.families.published import PUBLISHED
from tests.backends.megatron.generation.test_generation import CASES, Case, generated, requests_for, trajectories
from tests.backends.rollout.conftest import engine_for, run_config, write_weights

BITWISE = {"on_policy": "bitwise"}
RECOMPUTED = Layout("one rank, recomputed", engine={"recompute": "full"})
QUICK = {("qwen3", "one rank"), ("qwen3", "TP2"), ("qwen3_moe", "TP2, EP2"), ("deepseek_v3", "EP2")}


def marked(case, quick):
    marks = case.marks or ([] if quick else ["slow"])
    return pytest.param(case, id=f"{case.model}-{case.layout.name}", marks=[getattr(pytest.mark, one) for one in marks])


def language(model):
    fields = logits_fields(as_known(PUBLISHED.get(model) or CONFIGS[model]))
    return fields.get("text_config") or fields


KINDS = {model: language(model) for model in dict.fromkeys(case.model for case in CASES)}
WITH_TRANSFORMERS = [
    model for model, text in KINDS.items() if not has_experts(text) or text["model_type"] in SAME_EXPERTS
]
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}


def differing(workers, config, requests, found):
    """How many of the response's tokens have another log-prob in training, and how many tokens there are."""
    batch, log_probs = trajectories(requests, found)
    scored = workers.score(batch, UpdatePlan.from_config(config, workers.topology[0]), "policy")
    return (scored[batch.response_mask] != log_probs).sum().item(), len(log_probs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [marked(case, (case.model, case.layout.name) in QUICK) for case in (*CASES, Case("qwen3", RECOMPUTED))]
)
def test_on_the_training_ranks(case, dtype, ranks, tiny_family):
    layout, requests = case.layout, requests_for(**case.sampling)
    workers, config = ranks.engine(
        tiny_family(case.model),
        model={"dtype": dtype},
        parallel=layout.parallel,
        engine={**layout.engine, **BITWISE},
        rollout={"engine": "megatron", "max_batch_size": 12},
    )

    different, tokens = differing(workers, config, requests, generated(workers, requests))

    assert different == 0, tokens


def with_transformers(directory, dtype, ranks, tmp_path):
    """Generate with transformers; as ``differing``."""
    requests = requests_for()
    model = {"path": str(directory), "dtype": dtype, "tokenizer": "sort_digits.py:tokenizer"}
    config = run_config(model=model, max_batch_size=12)
    engine = engine_for(config.model_copy(update={"engine": EngineSection.model_validate(BITWISE)}))
    workers, config = ranks.engine(directory, model={"dtype": dtype}, engine=BITWISE)
    engine.load_weights(write_weights(tmp_path / "sent.safetensors", stored_weights(directory)))
    engine.submit(requests)
    found = {}
    while finished := engine.poll(1.0):
        found |= dict(finished)
    return differing(workers, config, requests, found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [marked(Case(model, ONE), model in {"qwen3", "qwen3_moe", "deepseek_v3"}) for model in WITH_TRANSFORMERS]
)
def test_with_transformers(case, dtype, ranks, tiny_family, tmp_path):
    different, tokens = with_transformers(tiny_family(case.model), dtype, ranks, tmp_path)

    refused = (case.model, dtype) == ("ernie4_5", "bfloat16")  # tests/backends/rollout/test_bitwise.py
    assert (different > 0) == refused, (different, tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_transformers_and_experts_in_groups(dtype, ranks, tmp_path):
    """The choosing biases are so large that they would be equal in 16 bits."""
    directory = write_tiny_model("deepseek_v3", tmp_path / "model", num_hidden_layers=3, **GROUPED)
    weights = load_file(directory / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = 8 + torch.linspace(-0.02, 0.02, 8)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})

    different, tokens = with_transformers(directory, dtype, ranks, tmp_path)

    assert different == 0, tokens


def test_every_form_of_experts_is_compared():
    assert set(SAME_EXPERTS) == set(ROUTERS) <= {text["model_type"] for text in KINDS.values()}


def test_the_usual_kernels_differ(ranks, tiny_family):
    """Otherwise the tests above would show nothing."""
    requests = requests_for()
    workers, config = ranks.engine(tiny_family("qwen3"), rollout={"engine": "megatron", "max_batch_size": 12})

    different, tokens = differing(workers, config, requests, generated(workers, requests))

    assert different > tokens // 4
