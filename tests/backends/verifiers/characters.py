"""A tokenizer of one token per character, with a chat template that shows tools."""

from __future__ import annotations

import string

SIGNS = string.digits + string.ascii_lowercase + " ?:;>+*[]"
SPECIAL = ("<eos>", "<pad>", "<unk>")
VOCABULARY = len(SIGNS) + len(SPECIAL)

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ message.content }}<eos>"
    "{% else %}{{ message.role[0] }}:{{ message.content }};{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SIGNS, *SPECIAL])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    )
    made.add_special_tokens({"eos_token": "<eos>"})
    return made
