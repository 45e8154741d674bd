"""Update models that take images, and compare log-probs with Hugging Face's; JSON on the last line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from anytron.config.anchor import anchor
from anytron.config.schema import RunConfig
from anytron.task.data.images import ImagePatches
from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, SamplingParams
from tests.vllm_models import EXAMPLES, answers, hf_model, send, vllm_engine, weights_of

START, IMAGE, END, VIDEO = 12, 13, 14, 15
"""Tokens of examples/count_shapes.py."""
PATCH = 8
"""Of its image processor."""
TOKENS = {
    "vision_start_token_id": START,
    "image_token_id": IMAGE,
    "vision_end_token_id": END,
    "video_token_id": VIDEO,
    "tie_word_embeddings": False,
}
TEXT: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": 8,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": VISION | {"window_size": 64, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": TEXT | {"head_dim": 32, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        "vision_config": VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
}


def prompt(*parts: int | tuple[int, int], seed: int) -> PromptInputs:
    """Tokens, and images of so many rows and columns of patches."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    patches, grids = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        rows, columns = part
        tokens += [START, *[IMAGE] * (rows * columns // 4), END]
        patches.append(torch.randn(rows * columns, 3 * 2 * PATCH * PATCH, generator=generator))
        grids.append([1, rows, columns])
    return PromptInputs(tuple(tokens), ImagePatches(torch.cat(patches), torch.tensor(grids)) if grids else None)


PROMPTS = [
    prompt(5, (4, 6), 4, 1, seed=1),
    prompt(5, (4, 6), 4, 1, seed=2),  # another picture
    prompt((2, 2), 3, seed=3),
    prompt(6, (12, 8), 3, 4, (2, 6), 6, 2, seed=4),  # two pictures, the first one of several windows
    prompt(5, 2, 6, seed=5),
]


@torch.no_grad()
def log_probs(model: Any, read: PromptInputs, response: tuple[int, ...]) -> torch.Tensor:
    """Hugging Face's log-probs of a response: in one pass after the prompt's, so that image tokens in it are text."""
    tokens, more = torch.tensor([read.tokens]), torch.tensor([response[:-1]])
    kinds = (tokens == IMAGE).int()
    images = {}
    if read.images is not None:
        images = {"pixel_values": read.images.pixel_values, "image_grid_thw": read.images.grid_thw}
    _, shift = model.model.get_rope_index(tokens, kinds, images.get("image_grid_thw"))
    first = model(input_ids=tokens, mm_token_type_ids=kinds, use_cache=True, **images)
    places = (tokens.shape[1] + torch.arange(more.shape[1]) + shift).expand(3, 1, -1)
    rest = model(input_ids=more, past_key_values=first.past_key_values, position_ids=places)
    logits = torch.cat([first.logits[0, -1:], rest.logits[0]]).double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def difference(engine: Any, model: Any) -> float:
    """The largest difference between the engine's log-probs and Hugging Face's."""
    params = SamplingParams(max_new_tokens=16, pad_token_id=8)
    asked = [GenerationRequest(place, read, params, 100 + place) for place, read in enumerate(PROMPTS)]
    answered = answers(engine, asked)
    drawn = {token for response in answered for token in response.tokens}
    assert IMAGE in drawn, "the models draw image tokens, which stand for no image"
    return max(
        float((log_probs(model, read, response.tokens) - torch.tensor(response.log_probs).double()).abs().max())
        for read, response in zip(PROMPTS, answered, strict=True)
    )


@torch.no_grad()
def logits_difference(engine: Any, model: Any) -> float:
    """The largest difference between log-softmax of whole sequences."""
    found = []
    for read, made in zip(PROMPTS, engine.logits(PROMPTS), strict=True):
        tokens = torch.tensor([read.tokens])
        images = {}
        if read.images is not None:
            images = {"pixel_values": read.images.pixel_values, "image_grid_thw": read.images.grid_thw}
        logits = model(input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), **images).logits[0]
        found.append(float((logits.log_softmax(-1) - made).abs().max()))
    return max(found)


def main(directory: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for family, parts in FAMILIES.items():
        fields = {"model_type": family, **parts, **TOKENS}
        values = {
            "model": {
                "config": fields,
                "dtype": "float32",
                "tokenizer": "count_shapes.py:tokenizer",
                "processor": "count_shapes.py:image_processor",
            },
            "data": {"source": "count_shapes.py:prompts"},
            "rewards": [{"function": "exact_match"}],
            "rollout": {"engine": "vllm"},
            "trainer": {"output_dir": str(directory / family)},
        }
        engine = vllm_engine(anchor(RunConfig.model_validate(values), EXAMPLES))
        differences = []
        for version in (1, 2):  # the second time vLLM has seen the images, with other weights
            model = hf_model(fields, seed=version)
            engine.load_weights(send(weights_of(model, directory / "model"), directory, version))
            differences.append(difference(engine, model))
        found[family] = max(differences)
        found[f"{family} logits"] = logits_difference(engine, model)
        engine.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
