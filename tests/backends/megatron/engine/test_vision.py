"""Vision-language models: images reach the same tokens as in Hugging Face, however the work is split."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from anytron.task.data.pretrained import model_class
from anytron_conformance.tiny_models import IMAGE_TOKEN
from tests.backends.megatron.engine.test_agreement import differences

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]


def hugging_face_log_probs(directory, batch):
    """Log-probs of responses, 0 elsewhere, one sequence at a time."""
    model = model_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, dtype=torch.float32)
    scores = []
    for tokens, images in zip(batch.tokens.split(batch.lengths.tolist()), batch.images, strict=True):
        extra = {} if images is None else {"pixel_values": images.pixel_values, "image_grid_thw": images.grid_thw}
        types = (tokens == IMAGE_TOKEN).int()[None]
        with torch.no_grad():
            logits = model(tokens[None], mm_token_type_ids=types, **extra).logits[0, :-1]
        log_softmax = logits.log_softmax(-1)
        scores.append(torch.cat([torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]))
    return torch.cat(scores) * batch.response_mask


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tiny_family):
    return tiny_family(request.param)


@pytest.fixture(scope="module")
def follow_images(follow, recorded_images, family):
    def run(**sections):
        model = {"path": str(family), "dtype": "float32", **sections.pop("model", {})}
        return follow(recorded_images, model=model, **sections)

    return run


@pytest.fixture(scope="module")
def one_rank(follow_images):
    return follow_images()


@pytest.mark.some(1)
def test_one_rank_scores_as_hugging_face_does(one_rank, recorded_images, family):
    expected = hugging_face_log_probs(family, recorded_images)
    torch.testing.assert_close(one_rank.log_probs, expected, atol=1e-5, rtol=1e-5)
    before = load_file(family / "model.safetensors")
    assert set(before) == set(one_rank.weights)


SPLITS = {
    "tp2-sp-bshd": {
        "parallel": {"tensor_model_parallel_size": 2},
        "engine": {"sequence_format": "bshd", "max_tokens_per_micro_batch": 64},
    },
}


@pytest.mark.some(1)
@pytest.mark.parametrize("split", SPLITS)
def test_a_split_agrees_with_one_rank(split, one_rank, follow_images):
    found = differences(one_rank, follow_images(**SPLITS[split]))
    assert found["log_probs"] <= 1e-5, found
    assert found["grad_norm"] <= 1e-5, found
    assert found["weights"] <= 1e-5, found


def generation_log_probs(directory, batch):
    """Log-probs as Hugging Face's ``generate`` has them: a prompt with its images, then single tokens.

    float32 ``[T]``, token coordinates.
    """
    model = model_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, dtype=torch.float32)
    lengths, scores = batch.lengths.tolist(), []
    parts = zip(batch.tokens.split(lengths), batch.response_mask.split(lengths), batch.images, strict=True)
    for tokens, response, images in parts:
        prompt = tokens[~response][None]
        extra = {} if images is None else {"pixel_values": images.pixel_values, "image_grid_thw": images.grid_thw}
        with torch.no_grad():
            output = model(prompt, mm_token_type_ids=(prompt == IMAGE_TOKEN).int(), use_cache=True, **extra)
            logits = [output.logits[0]]
            for token in tokens[response]:
                output = model(token.view(1, 1), past_key_values=output.past_key_values)
                logits.append(output.logits[0])
        log_probs = torch.cat(logits)[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        scores.append(torch.cat([torch.zeros(1), log_probs]))
    return torch.cat(scores) * batch.response_mask


def test_image_tokens_that_were_drawn_are_text_as_in_generation(start_engine, tiny_family, recorded_images):
    model = tiny_family("qwen3_vl")
    drawn = recorded_images.lengths.cumsum(0) - 2  # the last but one token of each response
    batch = replace(recorded_images, tokens=recorded_images.tokens.index_fill(0, drawn, IMAGE_TOKEN))
    with start_engine(model={"path": str(model)}) as (workers, updates, _):
        found = workers.score(batch, updates, "policy")
    torch.testing.assert_close(found, generation_log_probs(model, batch), atol=1e-5, rtol=0)


def part_of(name):
    if "visual" not in name:
        return "language_model"
    return "aligner" if "merger" in name else "vision_tower"


FROZEN = {
    "vision_tower": {"parallel": {"tensor_model_parallel_size": 2}},
    "language_model": {"engine": {"recompute": "full"}},
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_frozen_stays_bit_for_bit_and_does_not_decay(
    frozen, start_engine, tiny_family, recorded_images, policy_loss
):
    model = tiny_family("qwen3_vl")
    adam = {"name": "adam", "lr": 1e-2, "weight_decay": 0.5}
    with start_engine(model={"path": str(model), "freeze": [frozen]}, optimizer=adam, **FROZEN[frozen]) as (
        workers,
        updates,
        output,
    ):
        workers.update(recorded_images, updates, policy_loss)
        workers.export_weights(str(output / "after.safetensors"))
        after = load_file(output / "after.safetensors")
    before = load_file(model / "model.safetensors")
    moved = {part_of(name) for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"vision_tower", "aligner", "language_model"} - {frozen}
