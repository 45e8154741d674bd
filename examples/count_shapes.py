"""A toy task for the eyes: how many squares are in the picture?

Each picture has one to six squares, equally often, of random bright colours at random places of a dark
ground; the ground is 32 or 48 pixels wide and high. A model that ignores the picture is right once in six times. The
vocabulary is made on the spot: six digits, the question, and special tokens, sixteen in all. The model
starts from random weights: it has never seen a picture, and knows neither squares nor numbers.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

from anytron.tasks import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.tasks import Sample

DIGITS = "123456"
QUESTION = "?"
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SPECIAL = ("<eos>", "<pad>", "<unk>", "<extra0>", "<extra1>")
CELL = 8
"""Pixels: the side of a square with the gap around it, and of a patch."""


def tokenizer():
    """Make a tokenizer of one token per character; each special token is one token, too."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*DIGITS, QUESTION, *SPECIAL, *VISION])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(VISION),
    )


def image_processor():
    """Make an image processor that cuts pictures into patches of one cell each, and leaves their size alone."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=CELL,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def picture(squares: int, generator: random.Random) -> Image.Image:
    """Draw a picture."""
    width, height = generator.choice((32, 48)), generator.choice((32, 48))
    image = Image.new("RGB", (width, height), (20, 20, 20))
    draw = ImageDraw.Draw(image)
    cells = [(x, y) for x in range(0, width, CELL) for y in range(0, height, CELL)]
    for x, y in generator.sample(cells, squares):
        colour = tuple(generator.randint(128, 255) for _ in range(3))
        draw.rectangle((x + 1, y + 1, x + CELL - 2, y + CELL - 2), fill=colour)
    return image


def prompts(count: int = 10000, seed: int = 0) -> Iterator[Prompt]:
    """Draw ``count`` pictures as prompts; the data of each have its number of squares."""
    generator = random.Random(seed)
    for index in range(count):
        squares = generator.randint(1, len(DIGITS))
        yield Prompt(
            id=f"picture-{index}",
            text=f"<|vision_start|><|image_pad|><|vision_end|>{QUESTION}",
            images=[picture(squares, generator)],
            data={"answer": str(squares)},
        )


def reward(samples: Sequence[Sample]) -> list[float]:
    """Return 1 for the right number, 0 for everything else."""
    return [float(sample.response_text == sample.data["answer"]) for sample in samples]
