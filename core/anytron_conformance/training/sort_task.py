"""A task for tiny models: write given digits in ascending order. ``3195>`` is answered by ``1359``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from anytron.task.data import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.task.rewards import Sample

DIGITS = 4
VOCABULARY = (*"0123456789>", "<eos>", "<pad>", "<unk>", "<extra0>", "<extra1>")
MODEL = {
    "model_type": "qwen3",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index("<eos>"),
    "pad_token_id": VOCABULARY.index("<pad>"),
}


def tokenizer() -> Any:
    """Make a tokenizer of one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {token: index for index, token in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a special token
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")  # noqa: S106


def prompts() -> Iterator[Prompt]:
    """Draw 64 prompts of random digits."""
    generator = random.Random(0)
    for index in range(64):
        drawn = "".join(generator.choices("0123456789", k=DIGITS))
        yield Prompt(id=f"sort-{index}", text=f"{drawn}>", data={"answer": "".join(sorted(drawn))})


def reward(samples: Sequence[Sample]) -> list[float]:
    """Return the fraction of positions that hold the right digit."""
    return [
        sum(given == wanted for given, wanted in zip(sample.response_text, sample.data["answer"], strict=False))
        / DIGITS
        for sample in samples
    ]
