"""A reward model: its scores against Hugging Face in layouts of its own, and what it leaves of the device."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.base.errors import EngineError
from anytron.sequences.batch import RaggedBatch
from anytron.sequences.shared_prompts import common_prompts
from anytron_megatron.estimate.run import estimate_reward_model
from tests.reward_models import write_reward_model
from tests.slow import slow_but

LAYOUTS = {
    "thd": {},
    "bshd": {"engine": {"sequence_format": "bshd"}},
    "tp2-sp": {"tensor_model_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": False},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "dp2-bshd": {"data_parallel_size": 2, "engine": {"sequence_format": "bshd"}},
}
"""Parallel sizes of the reward model alone: those of the policy stay at 1."""
FAMILIES = ("llama", "qwen2", "qwen3_moe", "qwen3_tied")
SPLITS = {
    "ep2": {"data_parallel_size": 2, "expert_model_parallel_size": 2},
    "tp2-sp-ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
}


def asked(directory, /, **layout):
    engine = layout.pop("engine", {})
    return {
        "reward_model": {"path": str(directory), "parallel": layout, "max_tokens_per_micro_batch": 24},
        "engine": engine,
    }


def expected_scores(directory, batch):
    """Those of Hugging Face, sequence by sequence."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(tokens[None]).logits[0] for tokens in batch.tokens.split(batch.lengths.tolist())])


@pytest.fixture(scope="module")
def judge(tiny_family, tmp_path_factory):
    """Give the directory of a reward model of a family, written when first asked for."""
    return functools.cache(lambda family: write_reward_model(tiny_family(family), tmp_path_factory.mktemp("judge")))


@pytest.fixture(scope="module")
def padded(recorded):
    """The recorded trajectories, some of which end with tokens that the models' config calls padding."""
    tokens, ends = recorded.tokens.clone(), torch.cumsum(recorded.lengths, 0)
    tokens[ends[1] - 1] = 0
    tokens[ends[2] - 3 : ends[2]] = 0
    tokens[ends[3] : ends[4]] = 0  # nothing else
    tokens[ends[5]] = 0  # in front of another one
    return replace(recorded, tokens=tokens)


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "thd", "bshd", "tp2-sp", "pp2", "cp2", "dp2"))
def test_scores_are_those_of_hugging_face_in_every_layout(layout, ranks, tiny_model, judge, padded):
    model = judge("qwen3")
    workers, config = ranks.reward_model(tiny_model, **asked(model, **LAYOUTS[layout]))
    expected = expected_scores(model, padded)
    assert config.parallel.world_size == 1
    torch.testing.assert_close(workers.scores(padded), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "qwen2"))
def test_a_reward_model_of_another_family_scores_as_hugging_face(family, ranks, tiny_model, judge, padded):
    model = judge(family)
    workers, _ = ranks.reward_model(tiny_model, **asked(model))
    torch.testing.assert_close(workers.scores(padded), expected_scores(model, padded), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("split", slow_but(SPLITS, "ep2"))
def test_experts_are_shared_out(split, ranks, tiny_model, judge, padded):
    model = judge("qwen3_moe")
    workers, _ = ranks.reward_model(tiny_model, **asked(model, **SPLITS[split]))
    torch.testing.assert_close(workers.scores(padded), expected_scores(model, padded), atol=2e-5, rtol=1e-5)


def test_a_prompt_that_is_computed_once_for_several_responses_changes_no_score(ranks, tiny_model, judge, recorded):
    prompt, responses = recorded.tokens[:10], (0, 3, 5, 1)
    sequences = [torch.cat([prompt, recorded.tokens[20 : 20 + size]]) for size in responses]
    mask = [torch.arange(len(one)) >= len(prompt) for one in sequences]
    batch = RaggedBatch(torch.tensor([len(one) for one in sequences]), torch.cat(sequences), torch.cat(mask))
    sections = asked(judge("qwen3"))
    sections["reward_model"]["max_tokens_per_micro_batch"] = 64
    workers, _ = ranks.reward_model(tiny_model, **sections)
    assert common_prompts(batch.lengths, batch.tokens, batch.response_mask) is not None, "it is computed once"
    expected = expected_scores(judge("qwen3"), batch)
    torch.testing.assert_close(workers.scores(batch), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1


def test_without_a_padding_token_the_last_one_is_read(ranks, tiny_model, tiny_family, tmp_path, padded):
    model = write_reward_model(tiny_family("qwen3"), tmp_path / "judge", pad_token_id=None)
    workers, _ = ranks.reward_model(tiny_model, **asked(model))
    torch.testing.assert_close(workers.scores(padded), expected_scores(model, padded), atol=1e-5, rtol=1e-5)


def test_a_score_that_is_read_elsewhere_is_noticed(ranks, tiny_model, judge, recorded, write_extension):
    write_extension(
        "anytron_megatron.training.heads:scored_places",
        "lambda original: lambda batch, padding: original(batch, padding) - 1",
    )
    workers, _ = ranks.reward_model(tiny_model, **asked(judge("qwen3")))
    assert (workers.scores(recorded) - expected_scores(judge("qwen3"), recorded)).abs().max() > 0.1


def test_in_bfloat16_the_head_computes_in_float32(ranks, tiny_model, judge, recorded):
    workers, _ = ranks.reward_model(tiny_model, model={"dtype": "bfloat16"}, **asked(judge("qwen3")))
    found, expected = workers.scores(recorded), expected_scores(judge("qwen3"), recorded)
    assert found.dtype is torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, expected, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_it_leaves_the_device_and_is_as_large_as_the_plan_says(layout, ranks, tiny_model, judge, recorded):
    model = judge("qwen3_tied")
    sections = asked(model, **layout)
    sections["reward_model"]["offload"] = True
    workers, config = ranks.reward_model(tiny_model, **sections)
    (part,) = [part for part in estimate_reward_model(config.of_reward_model).parts if part.name == "reward-model"]
    assert (part.when, part.exact) == ("scoring", True)
    assert max(rank["offloaded_bytes"] for rank in workers.describe()) == part.size
    first, second = workers.scores(recorded), workers.scores(recorded)
    torch.testing.assert_close(first, expected_scores(model, recorded), atol=1e-5, rtol=1e-5)
    assert torch.equal(first, second)
    assert max(rank["offloaded_bytes"] for rank in workers.describe()) == part.size


def test_weights_that_do_not_fit_are_an_error_of_the_reward_model(ranks, tiny_model, judge, tmp_path):
    directory = write_reward_model(judge("qwen3"), tmp_path / "judge")
    weights = load_file(directory / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=rf"(?s)weights do not match.*{directory}.*score\.weight"):
        ranks.reward_model(tiny_model, **asked(directory))
