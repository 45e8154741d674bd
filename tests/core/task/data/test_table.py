"""What is left out of a source, and counted."""

from __future__ import annotations

import io
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from anytron.base.errors import ConfigError, DataError
from anytron.config.data import DataSection
from anytron.task.data.columns import in_memory
from anytron.task.data.mixture import load_mixture
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.data.table import PromptFilter, PromptTable
from tests.core.task.data.test_prompts import EXAMPLES, TOKENIZER, resolve

LIMITS = {"seed": 0, "vocab_size": 16, "context_length": 16, "max_new_tokens": 4}


def prompts(*tokens, images=()):
    return [TokenizedPrompt(str(index), "", tuple(one), {"n": index}, images) for index, one in enumerate(tokens)]


@pytest.fixture
def tokenizer():
    return resolve(f"{EXAMPLES}/sort_digits.py:tokenizer", TOKENIZER)()


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=20), st.integers(1, 4))
def test_what_is_kept_and_what_is_counted_make_up_what_was_read(tokens, longest):
    expected = [tuple(one) for one in dict.fromkeys(map(tuple, tokens)) if len(one) <= longest]
    if not expected:
        return
    table = PromptTable("s", in_memory(prompts(*tokens)), PromptFilter(longest, set()))
    assert [one.tokens for one in table] == expected
    assert table.read == len(tokens) == len(table) + table.too_long + table.duplicates
    assert table.too_long == sum(len(one) > longest for one in tokens)


def test_a_table_gives_what_it_was_given():
    given_prompts = prompts([1, 2], [2**31 - 1])
    table = PromptTable("s", in_memory(given_prompts), prefix="s/")
    assert (table[1].id, table[1].tokens, table[1].data) == ("s/1", (2**31 - 1,), {"n": 1})
    assert [one.id for one in table[:]] == ["s/0", "s/1"]
    assert (table.lengths, table.remark) == ([2, 1], "")


def test_the_digest_says_whether_the_tokens_are_the_same():
    digests = [
        PromptTable("s", in_memory(prompts(*one))).digest for one in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]])
    ]
    assert len(set(digests)) == 3
    assert PromptTable("t", in_memory(prompts([1, 2], [3])), PromptFilter(9)).digest == digests[0]


def test_the_first_of_equal_prompts_stays_over_all_sources():
    wanted = PromptFilter(None, set())
    first, second = (
        PromptTable("a", in_memory(prompts([1], [1], [2])), wanted),
        PromptTable("b", in_memory(prompts([2], [3])), wanted),
    )
    assert [one.tokens for one in first] == [(1,), (2,)]
    assert [one.tokens for one in second] == [(3,)]
    assert (first.remark, second.duplicates) == ("prompts of a: 2 of 3, without 1 equal to earlier ones", 1)
    with pytest.raises(
        DataError,
        match=r"(?s)Every prompt of a source was left out.*where: c.*of its 2 prompts, 2 repeat an earlier prompt",
    ) as caught:
        PromptTable("c", in_memory(prompts([1], [3])), wanted)
    assert caught.value.fix == "remove the source, or set data.deduplicate=false"


def test_equal_tokens_with_other_pictures_are_other_prompts(tmp_path):
    path, buffer = tmp_path / "a.png", io.BytesIO()
    Image.new("RGB", (8, 8), 7).save(path)
    Image.new("RGB", (8, 8), 8).save(buffer, "PNG")
    (tmp_path / "copy.png").write_bytes(path.read_bytes())
    images = [path, buffer.getvalue(), Image.new("RGB", (8, 8), 9), tmp_path / "copy.png", Image.new("RGB", (8, 8), 9)]
    given_prompts = [one for image in images for one in prompts([1], images=(image,))]
    table = PromptTable("s", in_memory(given_prompts), PromptFilter(None, set(), pictures=True))
    assert [one.images[0] for one in table] == images[:3]


def test_nothing_left_says_what_would_be_short_enough():
    with pytest.raises(
        DataError, match=r"(?s)Every prompt.*where: s.*of its 2 prompts, 2 have more than 1 tokens.*has 2.*lower"
    ):
        PromptTable("s", in_memory(prompts([1, 2, 3], [1, 2])), PromptFilter(1))
    with pytest.raises(DataError, match="no prompts"):
        PromptTable("s", in_memory([]))


def test_a_token_takes_four_bytes():
    def many():
        for index in range(200):
            yield TokenizedPrompt(str(index), "", tuple(range(1000, 3000)), {})

    tracemalloc.start()
    table = PromptTable("s", in_memory(many()))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(table) == 200
    assert used < 200 * 2000 * 5


@pytest.fixture
def source(tmp_path):
    (tmp_path / "s.py").write_text(
        "from anytron.task.data import Prompt\n"
        "def digits(*lengths):\n    return [Prompt(str(n), text='1' * n) for n in lengths]\n"
        "def given(lengths):\n    return digits(*lengths)\n"
    )

    def make(lengths, **keys):
        return DataSection(source=f"{tmp_path}/s.py:given", options={"lengths": lengths}, **keys)

    return make


def test_a_prompt_may_fill_the_context_exactly_and_no_more(tokenizer, source):
    mix = load_mixture(source([12, 13, 5]), tokenizer, **LIMITS)
    assert mix.tables[0].lengths == [12, 5]
    assert mix.remarks == ["prompts of s.py:given: 2 of 3, without 1 too long"]
    mix = load_mixture(source([12, 13, 5], max_prompt_tokens=5), tokenizer, **LIMITS)
    assert (mix.tables[0].lengths, mix.tables[0].too_long) == ([5], 2)
    without_limit = load_mixture(source([12, 13, 99]), tokenizer, **{**LIMITS, "context_length": None})
    assert without_limit.tables[0].lengths == [12, 13, 99]


def test_a_context_that_responses_fill_is_refused_before_a_prompt_is_read(tokenizer):
    nowhere = DataSection(source="jsonl", options={"path": "nowhere.jsonl"})
    with pytest.raises(ConfigError, match=r"(?s)no room for a prompt.*rollout\.max_new_tokens"):
        load_mixture(nowhere, tokenizer, **{**LIMITS, "max_new_tokens": 16})


def test_sources_of_a_mix_are_named_in_their_prompts_and_their_errors(tokenizer, source):
    first, second = source([3, 4]), source([5])
    mix = [
        {"source": first.source, "options": first.options, "weight": 1, "name": "short"},
        {"source": second.source, "options": second.options, "weight": 3},
    ]
    loaded = load_mixture(DataSection(mix=mix, deduplicate=True), tokenizer, **LIMITS)
    assert sorted({one.id for one in loaded.draw(20)}) == ["s.py:given/5", "short/3", "short/4"]
    mix[1]["options"] = {"lengths": 7}
    with pytest.raises(DataError, match=r"(?s)source of prompts raised.*data\.mix\.1\.source"):
        load_mixture(DataSection(mix=mix), tokenizer, **LIMITS)
