"""Tokenizer, image processor and prompts of a shrunk model: its vocabulary is not the published one."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from anytron.proof.shrinking.configuration import ORDINARY, TEXT, VISION
from anytron.proof.shrinking.language import VOCABULARY
from anytron.proof.shrinking.vision import PATCH
from anytron.task.data.examples import RESPONSE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROMPTS = 64
LENGTHS = (12, 24)
"""Fewest and most tokens of a prompt; a sliding window has fewer."""
MOST_TOKENS = 1024
"""More than a prompt has with its image and, in supervised fine-tuning, its response."""
_RESPONSE_TOKENS = 12
_SEED = 11


def write_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
    """Write a tokenizer in which each token is a word: ``t0``, ``t1``, ...

    Args:
        fields: The shrunk configuration, which numbers the special tokens.
        directory: Directory to write.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = _text(fields)[VOCABULARY]
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {
        f"{name}_token": f"t{number}"
        for name in ("bos", "eos", "pad")
        if (number := _special(fields, f"{name}_token_id")) is not None
    }
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory)


def write_image_processor(fields: Mapping[str, Any], directory: Path) -> None:
    """Write an image processor that cuts the patches which the shrunk vision tower reads, and leaves sizes alone."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tower = fields[VISION]
    merge = tower.get("spatial_merge_size", 2)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=merge,
        temporal_patch_size=tower.get("temporal_patch_size", 2),
        size={"shortest_edge": (PATCH * merge) ** 2, "longest_edge": 64 * 64},
    ).save_pretrained(directory)


def write_prompts(fields: Mapping[str, Any], directory: Path, *, images: bool) -> Path:
    """Write prompts of random tokens.

    Args:
        fields: The shrunk configuration.
        directory: Existing directory.
        images: Whether each prompt has an image.

    Returns:
        A JSON Lines file; each row also has a response, for supervised fine-tuning.
    """
    generator = random.Random(_SEED)
    used = {number for name in ("bos", "eos", "pad") for number in _all(fields, f"{name}_token_id")}
    ordinary = [number for number in range(3, ORDINARY) if number not in used]
    image = _special(fields, "image_token_id") if images else None
    rows = []
    for index in range(PROMPTS):
        tokens = generator.choices(ordinary, k=generator.randint(*LENGTHS))
        row: dict[str, Any] = {"prompt": tokens, RESPONSE: generator.choices(ordinary, k=_RESPONSE_TOKENS)}
        if image is not None:
            begin, end = (_special(fields, f"{place}_token_id") for place in _edges(fields))
            span = [number for number in (begin, image, end) if number is not None]
            row |= {
                "prompt": [*tokens[:6], *span, *tokens[6:]],
                "images": [_write_picture(generator, index, directory)],
            }
        rows.append(json.dumps(row))
    path = directory / "prompts.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def _write_picture(generator: random.Random, index: int, directory: Path) -> str:
    """Write a picture of random pixels, in sizes that are and are not multiples of a window."""
    from PIL import Image

    width, height = (8 * PATCH // 4 * generator.randint(2, 5) for _ in range(2))
    name = f"picture_{index}.png"
    Image.frombytes("RGB", (width, height), generator.randbytes(3 * width * height)).save(directory / name)
    return name


def _edges(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Names of the tokens around an image: Qwen's files and GLM's have different ones."""
    kind = "vision" if "vision_start_token_id" in fields else "image"
    return f"{kind}_start", f"{kind}_end"


def _text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    text = fields.get(TEXT)
    return text if isinstance(text, dict) else fields


def _all(fields: Mapping[str, Any], name: str) -> list[int]:
    value = _text(fields).get(name, fields.get(name))
    return [] if value is None else value if isinstance(value, list) else [value]


def _special(fields: Mapping[str, Any], name: str) -> int | None:
    return next(iter(_all(fields, name)), None)
