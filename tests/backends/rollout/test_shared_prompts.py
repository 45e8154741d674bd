"""A prompt is read once for all responses to it, and they are what they would be otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from anytron.task.data.pretrained import model_class
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from anytron_conformance.tiny_models import write_tiny_model
from anytron_rollout import generation
from tests.backends.rollout.conftest import engine_for, generate, run_config, write_weights

if TYPE_CHECKING:
    from anytron_rollout.transformers_engine import TransformersEngine

WINDOW = 6
SLIDING = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
PROMPT = st.lists(st.integers(3, 15), min_size=1, max_size=2 * WINDOW)
BATCHES = st.lists(st.tuples(PROMPT, st.integers(1, 4)), min_size=1, max_size=5)


@pytest.fixture(scope="module", params=["qwen3", "sliding_window", "qwen3_next"])
def engine(request, tmp_path_factory) -> TransformersEngine:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "sliding_window":
        config = AutoConfig.for_model(**SLIDING)
        config.save_pretrained(directory)
    else:
        config = AutoConfig.from_pretrained(write_tiny_model(request.param, directory))
    torch.manual_seed(0)
    weights = model_class(config).from_config(config, dtype=torch.float32).state_dict()
    engine = engine_for(run_config(model={"path": str(directory)}, max_batch_size=64))
    engine.load_weights(write_weights(directory / "weights.safetensors", weights))
    assert generation.can_share(engine._model)
    return engine


def responses(engine, groups, *, shares):
    prompts = [PromptInputs(tuple(tokens)) for tokens, samples in groups for _ in range(samples)]
    engine._shares_prompts = shares
    found = generate(engine, prompts, SamplingParams(max_new_tokens=4, pad_token_id=0), seed=3)
    engine._shares_prompts = True
    return [response for (response,) in found]


def assert_same(found, expected):
    """Compare responses. Sums are rounded differently: one draw may fall beyond the border to the next token's id."""
    beyond = 0
    for one, other in zip(found, expected, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=True))
        same = next((place for place, (token, wanted) in enumerate(pairs) if token != wanted), len(pairs))
        ours, theirs = (torch.tensor(response.log_probs[:same]) for response in (one, other))
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
        if same < len(pairs):
            token, wanted = pairs[same]
            assert abs(token - wanted) == 1
            beyond += 1
    assert beyond <= 1


@settings(max_examples=8, deadline=None)
@given(groups=BATCHES)
def test_responses_are_those_of_prompts_that_each_row_reads(engine, groups):
    assert_same(responses(engine, groups, shares=True), responses(engine, groups, shares=False))


def test_a_row_with_another_prompt_would_be_noticed(engine, monkeypatch):
    groups = [([3, 9, 5, 4, 7, 8, 3], 3), ([7, 4], 2), ([14, 3, 9, 5], 1)]
    expected = responses(engine, groups, shares=False)
    owners_of = generation.owners_of

    def wrong(prompts):
        rows, owners = owners_of(prompts)
        return rows, owners[1:] + owners[:1]

    monkeypatch.setattr("anytron_rollout.generation.owners_of", wrong)
    with pytest.raises(AssertionError):
        assert_same(responses(engine, groups, shares=True), expected)


def test_as_many_tokens_as_there_are_different_ones(engine):
    """Two prompts of 7 and 4 tokens, padded to 7: without the last column once, then that column for every row."""
    read = []
    layer = next(module for name, module in engine._model.named_modules() if name.endswith("layers.0"))
    hook = layer.register_forward_hook(lambda _, arguments, __: read.append(arguments[0].shape[:2]))
    responses(engine, [([3, 9, 5, 4, 7, 8, 3], 5), ([7, 4, 3, 8], 3)], shares=True)
    hook.remove()
    assert read == [(2, 6), *[(8, 1)] * 4]


def test_different_prompts_and_single_tokens_are_read_as_they_are(engine):
    assert generation.owners_of([PromptInputs((3, 4)), PromptInputs((3,)), PromptInputs((3, 4))]) == (
        [0, 1],
        [0, 1, 0],
    )
    for groups in ([([3, 9], 1), ([9, 3], 1)], [([3], 4)]):
        assert_same(responses(engine, groups, shares=True), responses(engine, groups, shares=False))


def test_models_with_images_read_every_row(new_engine, tmp_path):
    engine = new_engine(model={"path": str(write_tiny_model("qwen3_vl", tmp_path / "tiny"))})
    assert not generation.can_share(engine._model)


def test_routing_is_of_every_row(new_engine, tmp_path):
    path = str(write_tiny_model("qwen3_moe", tmp_path / "qwen3_moe"))
    assert not new_engine(model={"path": path}, replay_routing=True)._shares_prompts
    assert new_engine(model={"path": path})._shares_prompts
