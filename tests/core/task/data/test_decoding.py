"""Texts of responses: a table of bytes says what the tokenizer says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from anytron.task.data import decoding
from anytron.task.data.decoding import _is_byte_level, _is_plain, decode_responses

LETTERS = list(bytes_to_unicode().values())
WORDS = ["Ġthe", "âĤ¬", "âĤ", "ðŁĺ", "ĢĢ", "'ll", "ĊĊ"]
ADDED = [AddedToken("a b"), AddedToken("é"), AddedToken("ø√"), AddedToken("<|x|>", special=True)]
MARKS = [AddedToken("<think>", special=True), AddedToken("</think>", special=True), AddedToken("<tool>")]


def byte_level(*added, decoder=None, **options):
    words = {word: number for number, word in enumerate([*LETTERS, *WORDS])}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoder or decoders.ByteLevel()
    made.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", **options)


PLAIN, MARKED = byte_level(*ADDED), byte_level(*ADDED, *MARKS)
NUMBERS = st.lists(st.integers(0, len(MARKED) + 5), max_size=40)


@given(st.lists(NUMBERS, max_size=4))
def test_a_table_of_bytes_decodes_as_the_tokenizer(responses):
    assert _is_byte_level(PLAIN)
    assert decode_responses(PLAIN, responses) == [PLAIN.decode(one, skip_special_tokens=True) for one in responses]


@given(st.lists(NUMBERS, max_size=4))
def test_tags_of_thought_stay_and_other_special_tokens_do_not(responses):
    left_out = MARKED.convert_tokens_to_ids(["<|x|>", "</s>"])
    wanted = [MARKED.decode([token for token in one if token not in left_out]) for one in responses]
    assert decode_responses(MARKED, responses) == wanted


def test_added_tokens_change_the_table():
    tokenizer = byte_level()
    before = len(tokenizer)
    assert decode_responses(tokenizer, [(before,)]) == [""]
    tokenizer.add_tokens(["ø√"])
    assert decode_responses(tokenizer, [(before,)]) == ["ø√"]


class Louder(PreTrainedTokenizerFast):
    def _decode(self, *given, **wanted):
        return super()._decode(*given, **wanted).upper()


@pytest.mark.parametrize(
    "make",
    [
        lambda: byte_level(clean_up_tokenization_spaces=True),
        lambda: byte_level(decoder=decoders.Sequence([decoders.ByteLevel(), decoders.Strip("t", 1, 0)])),
        lambda: Louder(tokenizer_object=byte_level().backend_tokenizer),
    ],
)
def test_a_tokenizer_that_does_more_than_join_bytes_decodes_itself(make):
    tokenizer = make()
    assert not _is_byte_level(tokenizer)
    ids = tokenizer("the 'll the")["input_ids"]
    assert decode_responses(tokenizer, [ids]) == [tokenizer.decode(ids, skip_special_tokens=True)]


def words(decoder):
    tokens = {
        token: number for number, token in enumerate(["▁the", "s", "<0xE2>", "<0x82>", "##ly", " ", "<s>", "</s>"])
    }
    made = Tokenizer(models.WordLevel(tokens, unk_token="s"))
    made.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="s")


OTHERS = [
    words(decoders.Fuse()),
    words(decoders.WordPiece()),
    words(decoders.Metaspace()),
    words(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
]


@pytest.mark.parametrize("tokenizer", OTHERS)
@given(st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=9), st.integers(1, 12))
def test_many_responses_in_one_call_have_the_texts_of_single_calls(tokenizer, responses, at_once):
    assert _is_plain(tokenizer)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decoding, "_AT_ONCE", at_once)
        found = decode_responses(tokenizer, responses)
    assert found == [tokenizer.decode(one, skip_special_tokens=True) for one in responses]
