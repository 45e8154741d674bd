"""Llama 4: sequences within a chunk are trained, longer ones are refused, and the reasons hold in the sources."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from anytron_megatron.models.chunked_attention import longest_whole
from tests.backends.megatron.checks.test_model import bridge_sources, refusal, remarks
from tests.backends.megatron.families.published import PUBLISHED

SCOUT = PUBLISHED["llama4_scout"]


def scout(**fields):
    return {**SCOUT, "text_config": {**SCOUT["text_config"], **fields}}


LONG = scout(max_position_embeddings=10485760)


def test_the_bridge_ignores_chunks_and_temperatures():
    for name in ("attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale"):
        assert not [file for file, text in bridge_sources().items() if name in text]


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({}, 8191),
        ({"floor_scale": 16384}, 8192),
        ({"attn_temperature_tuning": False}, 8192),
        ({"attention_chunk_size": 16384}, 8191),
        ({"attention_chunk_size": None}, 8191),
        ({"attention_chunk_size": None, "attn_temperature_tuning": False}, None),
    ],
)
def test_the_longest_sequence_without_chunks_and_temperatures(fields, longest):
    assert longest_whole(scout(**fields)) == longest
    assert longest_whole({**scout(**fields), "model_type": "qwen3"}) is None


@pytest.mark.parametrize(("chunk", "floor"), [(8, 64), (64, 9), (9, 10)])
def test_up_to_that_length_transformers_computes_whole_unscaled_attention(chunk, floor):
    """And one token more makes a difference."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "vocab_size": 64, "head_dim": 8}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    kind = {"attention_chunk_size": chunk, "floor_scale": floor, "attn_scale": 1.0, "pad_token_id": 0}
    found = []
    longest = longest_whole({"model_type": "llama4", "text_config": kind})
    tokens = torch.arange(1, longest + 2)[None]
    for fields in (kind, {**kind, "attention_chunk_size": 4096, "attn_temperature_tuning": False}):
        torch.manual_seed(0)
        model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **counts, **fields, initializer_range=0.5)).eval()
        with torch.no_grad():
            found.append(model(tokens).logits[0])
    difference = (found[0] - found[1]).abs().amax(-1)
    assert difference[:longest].max() <= 1e-5
    assert difference[longest] > 1e-3


def test_a_context_within_a_chunk_needs_no_limit():
    assert remarks(SCOUT) == remarks(scout(max_position_embeddings=8191)) == []
    assert refusal(scout(max_position_embeddings=8192)).key == "data.max_prompt_tokens"


DATA = {"source": "s"}


def test_the_limit_that_the_refusal_names_is_enough():
    wrong = refusal(LONG)
    assert wrong.key == "data.max_prompt_tokens"
    assert "as many tokens as the model's context. llama4 attends to chunks" in wrong.message
    assert wrong.fix.startswith("set data.max_prompt_tokens=8183, or set max_position_embeddings=8191 in text_config")
    assert remarks(LONG, data={**DATA, "max_prompt_tokens": 8183}) == []
    longer = refusal(LONG, data={**DATA, "max_prompt_tokens": 8184})
    assert "sequences may have 8192 tokens" in longer.message


def test_responses_alone_may_be_too_long():
    wrong = refusal(LONG, rollout={"max_new_tokens": 8191}, data={**DATA, "max_prompt_tokens": 16})
    assert wrong.fix.startswith("set rollout.max_new_tokens below 8191")


def test_examples_of_fine_tuning_are_whole_sequences():
    sections = {"algorithm": {"name": "sft", "advantage": "none"}, "rewards": []}
    assert remarks(LONG, **sections, data={**DATA, "max_prompt_tokens": 8191}) == []
    assert "8192 tokens" in refusal(LONG, **sections, data={**DATA, "max_prompt_tokens": 8192}).message


VALIDATION = {"validation": {"sets": [{"name": "v", "data": DATA, "max_new_tokens": 9000}]}}


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"environment": {"path": "m:Environment"}}, "conversations"),
        ({**VALIDATION, "rollout": {"engine": "megatron", "max_new_tokens": 8}}, "sequences of validation"),
    ],
)
def test_what_only_the_context_limits_needs_a_shorter_one(sections, what):
    wrong = refusal(LONG, **sections, data={**DATA, "max_prompt_tokens": 16})
    assert (wrong.key, what in wrong.message) == ("model.config", True)
    assert remarks(scout(max_position_embeddings=8191), **sections) == []


def test_validation_by_another_engine_may_be_longer():
    assert remarks(LONG, **VALIDATION, data={**DATA, "max_prompt_tokens": 16}) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"no_rope_layers": [1, 0, 1, 0]}, "are not every 4th"),
        ({"no_rope_layer_interval": 2}, "are not every 4th"),
        ({"num_hidden_layers": 6}, "are not every 4th of a multiple of 4"),
        ({"moe_layers": [1, 3]}, "builds experts by interleave_moe_layer_step, 1"),
        ({"num_experts_per_tok": 2}, "for one expert of each token only"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type yarn are not supported"),
    ],
)
def test_layers_that_megatron_would_build_otherwise_are_refused(fields, words):
    assert words in refusal(scout(**fields)).message


@pytest.mark.parametrize(
    "fields", [{"no_rope_layers": []}, {"no_rope_layers": [1, 1, 1, 0]}, {"moe_layers": [0, 1, 2, 3]}]
)
def test_lists_that_say_what_is_built_anyway_are_taken(fields):
    assert remarks(scout(**fields)) == []


def test_the_reasons_hold_in_the_sources():
    (megatron,) = find_spec("megatron.core").submodule_search_locations
    experts = (Path(megatron) / "transformer" / "moe" / "experts.py").read_text(encoding="utf-8")
    assert "`moe_apply_probs_on_input` only works with `moe_router_topk`=1." in experts
    parser = bridge_sources()["config/parser.py"]
    assert "res['no_rope_freq'] = 4" in parser
    assert "moe_layers" not in parser


def test_adapters_are_refused_because_peft_finds_no_experts():
    from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN

    wrong = refusal(SCOUT, model={"config": SCOUT, "tokenizer": "t", "lora": {}})
    assert (wrong.key, "PEFT finds no experts in a llama4" in wrong.message) == ("model.lora", True)
    assert "qwen3_moe" in _MODEL_TO_CONVERSION_PATTERN
    assert not {"llama4", "llama4_text"} & set(_MODEL_TO_CONVERSION_PATTERN)
