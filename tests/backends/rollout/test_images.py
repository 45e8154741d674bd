"""Answers to prompts with images, in batches of different lengths and sizes, against plain Hugging Face code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from anytron.task.data.images import ImagePatches
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from anytron_conformance.tiny_models import CONFIGS, IMAGE_TOKEN, VISION_END, VISION_START, write_tiny_model
from tests.backends.rollout.conftest import generate

SAMPLING = SamplingParams(max_new_tokens=5, end_token_ids=tuple(range(2, 12)))
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]


def prompt(*parts, seed=0):
    """Text tokens as numbers, images as (rows, columns) of patches; two rows and columns merge into one token."""
    generator = torch.Generator().manual_seed(seed)
    tokens, pixels, grids = [], [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        rows, columns = part
        tokens += [VISION_START, *[IMAGE_TOKEN] * (rows * columns // 4), VISION_END]
        pixels.append(torch.randn(rows * columns, 3 * 2 * 4 * 4, generator=generator))
        grids.append([1, rows, columns])
    images = ImagePatches(torch.cat(pixels), torch.tensor(grids)) if pixels else None
    return PromptInputs(tuple(tokens), images)


PROMPTS = [
    prompt(5, (4, 6), 9, 11, seed=1),
    prompt((2, 2), 3, seed=2),
    prompt(8, 9, 10),
    prompt((8, 4), 3, 4, (2, 6), 6, 7, 8, seed=3),
    prompt((4, 6), 5, seed=4),
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def reference(family, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(write_tiny_model(family, tmp_path)).eval()
    with torch.no_grad():  # answers that hardly depend on what is seen would show nothing
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4 if "lm_head" in name else 2)
    return model


@pytest.fixture
def engine(family, new_engine, reference, write):
    engine = new_engine(model={"config": CONFIGS[family], "dtype": "float32"}, max_batch_size=16)
    engine.load_weights(write(reference.state_dict()))
    return engine


@torch.no_grad()
def alone(model, asked, response):
    """Log-probs of a response's tokens from one forward pass over the one, unpadded sequence."""
    tokens = torch.tensor([[*asked.tokens, *response]])
    seen = {}
    if asked.images is not None:
        seen["pixel_values"] = asked.images.pixel_values
        seen["image_grid_thw"] = asked.images.grid_thw
        seen["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    model.model.rope_deltas = None
    log_probs = model(tokens, **seen).logits[0].double().log_softmax(-1)
    return log_probs[len(asked.tokens) - 1 : -1].gather(-1, torch.tensor(response)[:, None])[:, 0]


def errors(engine, reference, expected=PROMPTS):
    """The largest error of each prompt's log-probs."""
    groups = generate(engine, PROMPTS, SAMPLING, seed=3, samples=6)
    found = []
    for asked, group in zip(expected, groups, strict=True):
        # A drawn image token stands for no image; a forward pass over all tokens cannot say so.
        plain = [response for response in group if IMAGE_TOKEN not in response.tokens]
        assert plain
        found.append(
            max(
                (torch.tensor(response.log_probs) - alone(reference, asked, response.tokens)).abs().max().item()
                for response in plain
            )
        )
    assert len({len(response.tokens) for group in groups for response in group}) > 1
    return found


def test_log_probs_in_a_ragged_batch_are_those_of_each_sequence_alone(engine, reference):
    assert max(errors(engine, reference)) < 1e-5


def test_other_pixels_and_another_shape_would_be_noticed(engine, reference):
    images = PROMPTS[0].images
    dark = replace(PROMPTS[0], images=ImagePatches(images.pixel_values * 0, images.grid_thw))
    turned = replace(PROMPTS[0], images=ImagePatches(images.pixel_values, torch.tensor([[1, 6, 4]])))
    for wrong in (dark, turned):
        found = errors(engine, reference, [wrong, *PROMPTS[1:]])
        assert found[0] > 1e-3
        assert max(found[1:]) < 1e-5


def test_a_batch_without_images_is_one_of_a_language_model(engine, reference):
    (group,) = generate(engine, PROMPTS[2:3], SAMPLING, seed=0, samples=6)
    for response in group:
        expected = alone(reference, PROMPTS[2], response.tokens)
        torch.testing.assert_close(torch.tensor(response.log_probs).double(), expected, atol=1e-5, rtol=0)
