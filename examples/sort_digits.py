"""A toy task that a tiny model learns in a minute or two: write given digits in ascending order.

``3195>`` is answered by ``1359``, or by ``9531`` where descending order is asked for. The vocabulary is
made on the spot: ten digits, the separator, and special tokens, sixteen in all.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from anytron.tasks import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.tasks import Sample

DIGITS = "0123456789"
SEPARATOR = ">"
SPECIAL = ("<eos>", "<pad>", "<unk>", "<extra0>", "<extra1>")


def tokenizer():
    """Make a tokenizer of one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*DIGITS, SEPARATOR, *SPECIAL])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def prompts(count: int = 4096, digits: int = 4, seed: int = 0, *, descending: bool = False) -> Iterator[Prompt]:
    """Draw ``count`` prompts of random digits; the sorted digits are in the prompt's data, as ``answer``."""
    generator = random.Random(seed)
    for index in range(count):
        drawn = "".join(generator.choices(DIGITS, k=digits))
        answer = "".join(sorted(drawn, reverse=descending))
        yield Prompt(id=f"sort-{index}", text=drawn + SEPARATOR, data={"answer": answer})


def examples(count: int = 4096, digits: int = 4, seed: int = 0) -> Iterator[Prompt]:
    """Draw prompts with the right answers as responses, for supervised fine-tuning."""
    for prompt in prompts(count, digits, seed):
        yield replace(prompt, data={"response": prompt.data["answer"]})


def reward(samples: Sequence[Sample]) -> list[float]:
    """Return the fraction of positions that hold the right digit."""
    return [
        sum(given == wanted for given, wanted in zip(sample.response_text, sample.data["answer"], strict=False))
        / len(sample.data["answer"])
        for sample in samples
    ]
