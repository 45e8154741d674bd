"""Vision-language models: images reach the same tokens as in Hugging Face, however the work is split."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.backends.megatron.engine.test_agreement import differences
from tests.tiny_models import IMAGE_TOKEN, hf_model_class

FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


def hugging_face_log_probs(directory, batch):
    """Per-token log-probs, one sequence at a time."""
    model = hf_model_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, dtype=torch.float32)
    scores = []
    for tokens, images in zip(batch.tokens.split(batch.lengths.tolist()), batch.images, strict=True):
        extra = {} if images is None else {"pixel_values": images.pixel_values, "image_grid_thw": images.grid_thw}
        types = (tokens == IMAGE_TOKEN).int()[None]
        with torch.no_grad():
            logits = model(tokens[None], mm_token_type_ids=types, **extra).logits[0, :-1]
        log_softmax = logits.log_softmax(-1)
        scores.append(torch.cat([torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]))
    return torch.cat(scores)


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


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_agrees_with_one_rank(split, one_rank, follow_images):
    found = differences(one_rank, follow_images(**SPLITS[split]))
    assert found["log_probs"] <= 1e-5, found
    assert found["grad_norm"] <= 1e-5, found
    assert found["weights"] <= 1e-5, found
