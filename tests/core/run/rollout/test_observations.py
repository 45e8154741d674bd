"""What an environment says, as tokens behind the model's; a rendering of the whole conversation is the oracle."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from anytron.run.rollout.conversation import observation_tokens
from anytron.task.environments import Observation
from anytron.task.isolation.failure import Failure

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"]
MESSAGES = [{"role": "tool", "content": "it is 85"}, {"role": "user", "content": "and twice that?"}]


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each character; the marks of ChatML are whole."""
    vocabulary = {sign: index for index, sign in enumerate([*ALPHABET, "<unk>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    characters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHATML
    return made


def tokens_of(observation, last, tokenizer, **template):
    return observation_tokens(observation, last, tokenizer, len(tokenizer), template)


def test_messages_give_what_the_template_writes_behind_a_turn(tokenizer):
    before = [{"role": "user", "content": "what is 37 + 48?"}]
    said = "a moment"
    turn = [*tokenizer(said)["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
    whole = [*before, {"role": "assistant", "content": said}, *MESSAGES]
    expected = tokenizer(tokenizer.apply_chat_template(whole, add_generation_prompt=True, tokenize=False))["input_ids"]
    for written in (turn, turn[:-1]):  # ended by the model, or cut off by a limit
        read = tokens_of(Observation(messages=MESSAGES), written[-1], tokenizer)
        assert tokenizer(prompt)["input_ids"] + written + list(read) == expected
    assert tokens_of(Observation(messages=MESSAGES), None, tokenizer) == read


def test_the_template_gets_the_same_arguments_as_for_prompts(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHATML + "{% if think is defined %}{{ think }}{% endif %}")
    said = Observation(messages=MESSAGES)
    plain, thinking = tokens_of(said, None, tokenizer), tokens_of(said, None, tokenizer, think="hm")
    assert tokenizer.decode(thinking) == tokenizer.decode(plain) + "hm"


def test_text_is_tokenised_by_itself_and_tokens_are_taken(tokenizer):
    assert tokenizer.decode(tokens_of(Observation(text="85;"), 3, tokenizer)) == "85;"
    assert tokens_of(Observation(tokens=[4, 5]), 4, tokenizer) == (4, 5)


@pytest.mark.parametrize(
    ("template", "observation", "what", "why"),
    [
        ("{{ raise_exception('no tools') }}", Observation(messages=MESSAGES), "cannot be tokenised", "no tools"),
        (
            "{{ messages[-1].content }}",
            Observation(messages=MESSAGES),
            "cannot be tokenised",
            "drops, repeats or changes",
        ),
        (CHATML, Observation(text="\ud800"), "cannot be tokenised", "surrogate"),
        (CHATML, Observation(text=""), "has no tokens", "not stopped"),
        (CHATML, Observation(tokens=[-1]), "does not know", "ids are from -1"),
        (None, Observation(messages=MESSAGES), "cannot be tokenised", "chat_template"),
    ],
)
def test_what_cannot_be_read_says_why(tokenizer, template, observation, what, why):
    tokenizer.chat_template, before = template, tokenizer.chat_template
    try:
        found = tokens_of(observation, 3, tokenizer)
    finally:
        tokenizer.chat_template = before
    assert isinstance(found, Failure)
    assert what in found.what
    assert why in found.why
