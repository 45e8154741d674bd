"""A tokenizer of one token per character, for models that start from random weights; made on the spot."""

from __future__ import annotations

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,:;?!'\"()[]<>=+-*/_"
SPECIAL = ("<eos>", "<pad>", "<unk>")


def tokenizer():
    """Make the tokenizer: 61 tokens, capitals read as small letters, everything else as unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*CHARACTERS, *SPECIAL])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.normalizer = normalizers.Lowercase()
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
