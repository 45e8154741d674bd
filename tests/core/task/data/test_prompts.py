"""Prompts from sources to tokens."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError, DataError
from anytron.config.imports import resolve
from anytron.config.schema import DataSection
from anytron.task.data import Prompt
from anytron.task.data.pretrained import TOKENIZER
from anytron.task.data.prompts import AT_ONCE, batched, size_of, tokenize
from anytron.task.data.sources import load_prompts

EXAMPLES = Path(__file__).parents[4] / "examples"
VOCABULARY = 16


@pytest.fixture
def tokenizer():
    return resolve(f"{EXAMPLES}/sort_digits.py:tokenizer", TOKENIZER)()


def write(path: Path, *records) -> DataSection:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return DataSection(source="jsonl", options={"path": str(path)})


def test_a_prompt_without_data_travels_to_other_processes():
    prompt = Prompt("a", text="31>")
    assert pickle.loads(pickle.dumps(prompt)) == prompt


def test_a_file_of_lines(tmp_path):
    data = write(
        tmp_path / "p.jsonl", {"prompt": "31>", "answer": "13"}, {"id": "second", "prompt": [5, 10], "answer": "5"}
    )
    first, second = load_prompts(data)
    assert first == Prompt("line 1", text="31>", data={"answer": "13"})
    assert second == Prompt("second", tokens=(5, 10), data={"id": "second", "answer": "5"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"(?s)cannot be read.*p\.jsonl.*no such file.*option `path`"),
        ("{oops", r"(?s)p\.jsonl:1.*not JSON"),
        ('{"question": "?"}', "(?s)no column 'prompt'.*p.jsonl:1.*'question'.*columns`: {prompt: COLUMN}"),
        ("[1]", "(?s)not an object.*list"),
        ('{"prompt": 5}', "(?s)neither a string nor a list.*int"),
        ('{"prompt": [1, true]}', "neither a string nor a list"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", r"not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "a", "x": ' + "[" * 50 + "]" * 50 + "}", "nested more than 32 levels"),
        (
            r'{"prompt": "a\ud800"}',
            r"(?s)text that is not valid Unicode.*p\.jsonl:1.*prompt has half of a surrogate pair",
        ),
        (r'{"prompt": "a", "id": "\uD800"}', "(?s)text that is not valid Unicode.*id has half"),
        (r'{"prompt": [{"role": "user", "content": "\udfff"}]}', r"prompt\.0\.content has half"),
        (r'{"prompt": "a", "\ud800": 1}', "(?s)text that is not valid Unicode.*the line has half"),
        (r'"\ud800"', "(?s)text that is not valid Unicode.*the line has half"),
    ],
)
def test_a_file_that_is_not_usable(tmp_path, content, message):
    if content is not None:
        (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        list(load_prompts(DataSection(source="jsonl", options={"path": str(tmp_path / "p.jsonl")})))


def test_a_function_in_a_file():
    source = f"{EXAMPLES}/sort_digits.py:prompts"
    prompts = list(load_prompts(DataSection(source=source, options={"count": 5, "digits": 3})))
    assert [prompt.id for prompt in prompts] == [f"sort-{index}" for index in range(5)]
    assert all(sorted(prompt.text[:3]) == list(prompt.data["answer"]) for prompt in prompts)


def test_a_source_that_fails_or_gives_something_else(tmp_path):
    (tmp_path / "s.py").write_text("def strings():\n    return ['a']\n\ndef fails():\n    raise OSError('disk')\n")
    with pytest.raises(DataError, match=r"(?s)strings.*returned str as entry 0, not a Prompt"):
        list(load_prompts(DataSection(source=f"{tmp_path}/s.py:strings")))
    with pytest.raises(DataError, match=r"(?s)source of prompts raised.*s\.py:fails.*OSError: disk \(line 5"):
        list(load_prompts(DataSection(source=f"{tmp_path}/s.py:fails")))
    with pytest.raises(ConfigError, match="did you mean jsonl"):
        list(load_prompts(DataSection(source="json")))


def test_text_and_tokens_meet(tokenizer):
    prompts = [Prompt("a", text="31>", data={"n": 1}), Prompt("b", tokens=(5, 10))]
    first, second = tokenize(prompts, tokenizer, vocab_size=VOCABULARY)
    assert (first.id, first.text, first.tokens, first.data) == ("a", "31>", (3, 1, 10), {"n": 1})
    assert (second.text, second.tokens) == ("5>", (5, 10))


def with_ends(tokenizer, begin="8", end="9"):
    """Let it put tokens around every text, as many do with <s> and </s>."""
    from tokenizers.processors import TemplateProcessing

    special = [(one, tokenizer.convert_tokens_to_ids(one)) for one in (begin, end)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A {end}", special_tokens=special)
    return tokenizer


def test_a_prompt_has_the_tokenizer_s_beginning_once_and_nothing_behind_it(tokenizer):
    prompts = [
        Prompt("plain", text="31>"),
        Prompt("begun", text="831>"),
        Prompt("ended", text="319"),
        Prompt("tokens", tokens=(3, 1)),
        Prompt("messages", messages=[{"role": "user", "content": "31>"}]),
    ]
    tokenizer.chat_template = "{{ messages[0].content }}"
    found = tokenize(prompts, with_ends(tokenizer), vocab_size=VOCABULARY)
    assert [one.tokens for one in found] == [(8, 3, 1, 10), (8, 3, 1, 10), (8, 3, 1, 9), (3, 1), (3, 1, 10)]
    with pytest.raises(DataError, match="no tokens"):  # not even where the tokenizer begins it
        list(tokenize([Prompt("empty", text=""), prompts[0]], tokenizer, vocab_size=VOCABULARY))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt("p7", text=""), "(?s)no tokens.*p7"),
        (Prompt("p7", tokens=(3, 16)), "(?s)outside of the model's vocabulary.*p7.*3 to 16.*has 16"),
        (Prompt("p7", tokens=(-1,)), "outside of the model's vocabulary"),
    ],
)
def test_a_prompt_that_the_model_cannot_answer_is_named(tokenizer, prompt, message):
    with pytest.raises(DataError, match=message):
        list(tokenize([Prompt("fine", text="1>"), prompt], tokenizer, vocab_size=VOCABULARY))


def test_few_prompts_are_in_memory_at_a_time(tokenizer):
    given = iter(Prompt(str(number), text="1>") for number in range(10 * AT_ONCE))
    first = next(iter(tokenize(given, tokenizer, vocab_size=VOCABULARY)))
    assert (first.id, next(given).id) == ("0", str(AT_ONCE))


def test_further_arguments_reach_the_chat_template(tokenizer):
    tokenizer.chat_template = "{{ '7' if think else '8' }}{{ messages[0].content }}"
    prompt = Prompt("p", messages=[{"role": "user", "content": "1"}])
    given = [tokenize([prompt], tokenizer, vocab_size=16, chat_template_kwargs={"think": one}) for one in (True, False)]
    assert [next(one).text for one in given] == ["71", "81"]


@pytest.mark.parametrize("given", [{}, {"text": "a", "tokens": (1,)}, {"text": "a", "messages": ()}])
def test_a_prompt_is_text_messages_or_tokens(given):
    with pytest.raises(DataError, match="one of text, messages and tokens"):
        Prompt("p", **given)


def test_the_chat_template_shows_the_tools_of_a_prompt(tokenizer):
    tokenizer.chat_template = "{{ (tools or []) | map(attribute='function.name') | join }}{{ messages[0].content }}>"
    tools = [{"type": "function", "function": {"name": name}} for name in "78"]
    messages = [{"role": "user", "content": "1"}]
    prompts = [Prompt("p", messages=messages, tools=tools), Prompt("q", messages=messages)]
    assert [one.text for one in tokenize(prompts, tokenizer, vocab_size=VOCABULARY)] == ["781>", "1>"]
    with pytest.raises(DataError, match=r"(?s)tools and no messages.*p7"):
        Prompt("p7", text="1>", tools=tools)


def test_lines_end_at_line_feeds_only_and_a_byte_order_mark_is_none_of_them(tmp_path):
    records = [{"prompt": "1>\u2028\x85", "answer": "\u2029"}, {"prompt": "2> \U0001f600"}]
    text = "\r\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    first, second = load_prompts(DataSection(source="jsonl", options={"path": str(tmp_path / "p.jsonl")}))
    assert (first.text, first.data["answer"]) == ("1>\u2028\x85", "\u2029")
    assert second.text == "2> \U0001f600"


@pytest.mark.parametrize("prompt", [Prompt("p7", text="1\ud800"), Prompt("p7\ud800", text="1>")])
def test_half_of_a_surrogate_pair_is_no_text(tokenizer, prompt):
    with pytest.raises(DataError, match=r"(?s)text that is not valid Unicode.*p7"):
        list(tokenize([prompt], tokenizer, vocab_size=VOCABULARY))


def test_what_the_tokenizer_cannot_take_is_said(tokenizer):
    with pytest.raises(DataError, match=r"(?s)tokenizer fails.*prompts p7 to p8"):
        list(tokenize([Prompt("p7", text=5), Prompt("p8", text="1>")], tokenizer, vocab_size=VOCABULARY))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 10.0 ** 1000 }}", "OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|UndefinedError"),
        ("{% include 'x' %}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x' * 2 ** 62 }}", "MemoryError|OverflowError"),
        ("{{ raise_exception('no system turns') }}", "no system turns"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "TimeoutError: it did not end within 1 seconds",
        ),
    ],
)
def test_whatever_a_chat_template_does_is_an_error_of_its_prompt(tokenizer, template, why, monkeypatch):
    monkeypatch.setattr("anytron.task.data.prompts.TEMPLATE_SECONDS", 1.0)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=f"(?s)chat template refuses.*p7.*({why})"):
        list(tokenize([Prompt("p7", messages=[{"role": "user", "content": "1>"}])], tokenizer, vocab_size=VOCABULARY))


def test_prompts_are_as_large_as_their_messages_and_what_is_nested_in_their_data():
    said = [{"role": "user", "content": [{"type": "text", "text": "a" * 100}]}]
    prompts = [Prompt("a", messages=said, data={"tests": [{"input": "b" * 1000}, ("c" * 10, b"d")], "n": 1})] * 5
    assert 1111 <= size_of(prompts[0]) < 1200
    assert [len(some) for some in batched(prompts, size=2000)] == [2, 2, 1]
