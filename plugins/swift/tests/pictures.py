"""Tiny models that see, conversations with pictures, and what transformers makes of both."""

from __future__ import annotations

import json
import random
import string
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from anytron_conformance.tiny_models import CONFIGS, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, ProcessorMixin


class Family(NamedTuple):
    """What ms-swift's template of a family has written into it, and which processors read its pictures."""

    image_token: int  # swift/template/templates/qwen.py, lines 310 and 618; that of videos is the next one
    patch: int  # pixels; qwen_vl_utils makes the sides of pictures multiples of two patches
    processor: type[ProcessorMixin]
    videos: type
    thinking: str = ""  # before answers

    @property
    def vision(self) -> dict[str, int]:
        """The config's part, with windows of four patches."""
        return {"patch_size": self.patch, "window_size": 4 * self.patch}


FAMILIES = {
    "qwen2_5_vl": Family(151655, 14, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    "qwen3_vl": Family(151655, 16, Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "qwen3_5": Family(248056, 16, Qwen3VLProcessor, Qwen3VLVideoProcessor, thinking="<think>\n\n</think>\n\n"),
}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
OPTIONS = {"freeze_vit": "false", "freeze_aligner": "false", "vit_attn_impl": "sdpa"}
"""What ms-swift is told for these models: all of them is trained, and flash-attn is not asked for."""
CONVERSATIONS = ((1, 2), (0, 7), (2, 4), (1, 11), (1, 3), (0, 5))
"""How many pictures and digits each of them has."""


def prepare(directory: Path, family: str) -> Path:
    """Write a tiny model with its processor, and six conversations of different lengths, four of them with pictures."""
    image_token, patch, *_ = shape = FAMILIES[family]
    model, config = directory / "model", CONFIGS[family]
    words = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|vision_start|>", "<|vision_end|>")
    special = {word: image_token - len(words) + index for index, word in enumerate(words)}
    special |= {"<|image_pad|>": image_token, "<|video_pad|>": image_token + 1}
    write_tiny_model(
        family,
        model,
        text_config={**config["text_config"], "vocab_size": image_token + 8 - image_token % 8},
        vision_config={**config["vision_config"], **shape.vision},
        image_token_id=image_token,
        video_token_id=image_token + 1,
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
    )
    shape.processor(
        Qwen2VLImageProcessorPil(patch_size=patch), tokenizer(special), shape.videos(patch_size=patch)
    ).save_pretrained(model)
    drawn = random.Random(0)
    with (directory / "train.jsonl").open("w", encoding="utf-8") as file:
        for index, (pictures, digits) in enumerate(CONVERSATIONS):
            paths = [directory / f"{index}-{number}.png" for number in range(pictures)]
            for path in paths:
                noise(drawn, 2 * patch * drawn.choice((2, 3)), 4 * patch).save(path)
            text = "".join(drawn.choices(string.digits, k=digits))
            messages = [("system", "see"), ("user", "<image>" * pictures + text), ("assistant", text[::-1])]
            line: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in messages]}
            if paths:
                line["images"] = [str(path) for path in paths]
            file.write(json.dumps(line) + "\n")
    return directory


def noise(drawn: random.Random, width: int, height: int) -> Image.Image:
    """Draw a picture in which no two patches are alike."""
    return Image.frombytes("RGB", (width, height), drawn.randbytes(3 * width * height))


def tokenizer(special: dict[str, int]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per byte, as Qwen's without its merges, with the special tokens of the family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(models.BPE(letters | special, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=found,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
    )


def answer_losses(directory: Path, model: PreTrainedModel) -> list[torch.Tensor]:
    """Compute transformers' loss of each token of each answer, its end included, each conversation by itself."""
    processor = AutoProcessor.from_pretrained(directory / "model")
    thinking = FAMILIES[model.config.model_type].thinking
    losses = []
    for line in (directory / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        system, user, answer = (message["content"] for message in row["messages"])
        turns = ("system", system), ("user", user.replace("<image>", PLACE))
        prompt = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        prompt += f"<|im_start|>assistant\n{thinking}"
        ending = f"{answer}<|im_end|>\n"
        inputs = processor(
            text=[prompt + ending],
            images=[Image.open(path) for path in row.get("images", [])] or None,
            do_resize=False, return_mm_token_type_ids=True, return_tensors="pt",
        )  # fmt: skip
        answered = len(processor.tokenizer(ending)["input_ids"])
        logits = model(**inputs).logits[0, -answered - 1 : -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, -answered:], reduction="none"))
    return losses
