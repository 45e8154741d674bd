"""The routing that responses carry, against plain Hugging Face code that looks at the routers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.base.errors import EngineError
from anytron.proof.verification.weights import stored_weights
from anytron.task.data.model_files import as_known
from anytron.task.data.pretrained import logits_config, model_class, read_hf_config, take_latent_epsilon
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from anytron_conformance.tiny_models import CONFIGS, write_tiny_model
from anytron_rollout.checks import RECORDED, diagnostics
from anytron_rollout.transformers_engine import RoutingRecorder
from tests.backends.megatron.families.layouts import WITH_REPLAY
from tests.backends.megatron.families.published import PUBLISHED, write_published_model
from tests.backends.rollout.conftest import generate, run_config
from tests.chosen_experts import chosen_by

LENGTHS = (1, 2, 9, 4)
CHANGES = {"qwen3_moe": {"num_experts": 8}, "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}}
LAYERS = {"qwen3_moe": 4, "deepseek_v3": 3, "qwen3_next": 4}
WITHOUT_DENSE = ("gpt_oss", "minimax_m2", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl_moe")
"""Published configurations with experts in each of their four layers."""
OTHERS = ("qwen3_next", *(name for name in WITH_REPLAY if as_known(PUBLISHED[name]) is PUBLISHED[name]))
MODELS = [*CHANGES, *(pytest.param(name, marks=pytest.mark.families) for name in OTHERS)]


def written(name, directory):
    """Write a tiny model; return its directory and the number of its layers with experts."""
    if name in PUBLISHED:
        dense = PUBLISHED[name].get("text_config", PUBLISHED[name]).get("first_k_dense_replace", 1)
        return write_published_model(name, directory), 4 - (0 if name in WITHOUT_DENSE else dense)
    return write_tiny_model(name, directory, **CHANGES.get(name, {})), LAYERS[name]


def test_every_family_that_is_told_is_one_of_these():
    assert {({**CONFIGS, **PUBLISHED}[name])["model_type"] for name in (*CHANGES, *OTHERS)} == set(RECORDED)


@pytest.mark.parametrize("name", MODELS)
def test_each_token_but_the_last_has_the_experts_that_it_went_to(name, new_engine, write, tmp_path):
    directory, layers = written(name, tmp_path / name)
    config = logits_config(read_hf_config(directory))
    reference = model_class(config).from_pretrained(directory, config=config, dtype=torch.float32)
    take_latent_epsilon(reference)  # as rollouts do
    generator = torch.Generator().manual_seed(0)
    prompts = [PromptInputs(tuple(torch.randint(3, 119, (n,), generator=generator).tolist())) for n in LENGTHS]
    sampling = SamplingParams(max_new_tokens=9, end_token_ids=tuple(range(16)), pad_token_id=0)

    def responses(**settings):
        engine = new_engine(model={"path": str(directory)}, max_batch_size=12, **settings)
        engine.load_weights(write(stored_weights(directory)))
        engine.logits(prompts[:1])  # what is computed beside generation is no part of a response
        return generate(engine, prompts, sampling, seed=1, samples=6)

    groups, lengths = responses(replay_routing=True), set()
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group:
            sequence = prompt.tokens + response.tokens
            assert response.routing.shape == (len(sequence) - 1, layers, 2)
            assert response.routing.dtype is torch.uint8
            assert torch.equal(response.routing.long().sort(-1).values, chosen_by(reference, sequence)[:-1])
            lengths.add(len(response.tokens))
    assert len(lengths) > 3, "the batch must be ragged, or the test shows little"

    without = responses()
    assert all(response.routing is None for group in without for response in group)
    assert [[response.tokens for response in group] for group in without] == [
        [response.tokens for response in group] for group in groups
    ]


def test_other_models_are_refused_before_anything_starts():
    def found(model_type, **rollout):
        config = run_config({"config": {"model_type": model_type}}, **rollout)
        return [(one.severity, one.key, one.message) for one in diagnostics(config, None)]

    message = "the engine transformers cannot record the routing of llama4"
    assert found("llama4", replay_routing=True) == [("error", "rollout.replay_routing", message)]
    assert found("qwen3_moe", replay_routing=True) == found("llama4") == []


def test_a_model_whose_experts_are_called_otherwise_is_refused():
    """What another version of transformers might do."""
    fields = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = AutoConfig.for_model("qwen3_moe", **fields, num_key_value_heads=1, num_experts=4, moe_intermediate_size=8)
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[0].mlp.experts.forward = lambda hidden, weights: hidden
    model.model.layers[0].mlp.forward = lambda hidden: model.model.layers[0].mlp.experts(hidden, hidden)
    with RoutingRecorder(model).recording(), pytest.raises(EngineError, match="cannot record the routing"):
        model(torch.tensor([[1, 2]]))
    del model.model.layers[0].mlp.experts
    with pytest.raises(EngineError, match="cannot record the routing"):
        RoutingRecorder(model)
