"""Examples of supervised fine-tuning: which tokens there are, and which are learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from anytron.base.errors import ConfigError, DataError
from anytron.config.imports import resolve
from anytron.config.schema import DataSection
from anytron.task.data import Prompt
from anytron.task.data.examples import tokenize_examples
from anytron.task.data.mixture import load_mixture
from anytron.task.data.pretrained import TOKENIZER
from anytron.task.data.prompts import tokenize

SORT = f"{Path(__file__).parents[4]}/examples/sort_digits.py:tokenizer"
SPECIAL = ["<sys>", "<user>", "<bot>", "<think>", "<tool>", "|"]
WORDS = [
    "<end>",
    "<sys>",
    "<user>",
    "<bot>",
    "<think>",
    "hello",
    "there",
    "who",
    "are",
    "you",
    "a",
    "bot",
    "<tool>",
    "\n",
]
TURNS = (
    "{% for message in messages %}{{ '<bot>' if message.role == 'assistant' else '<' + message.role + '>' }}"
    "{% if message.role == 'assistant' %}BEGIN{{ message.content }}<end>FINISH"
    "{% else %}{{ message.content }}<end>{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PLAIN = TURNS.replace("BEGIN", "").replace("FINISH", "")
MARKED = TURNS.replace("BEGIN", "{% generation %}").replace("FINISH", "{%- endgeneration -%}")
THINKING = PLAIN.replace("{% if add_generation_prompt %}<bot>", "{% if add_generation_prompt %}<bot><think>")
HELLO = {"role": "user", "content": "hello there"}
WHO = {"role": "user", "content": "who are you"}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def sort():
    return resolve(SORT, TOKENIZER)()


@pytest.fixture
def chat():
    """A tokenizer of words, whose conversations look like those of ChatML."""

    def make(template):
        vocabulary = {word: index for index, word in enumerate([*WORDS, "<unk>"])}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
        words.decoder = decoders.Fuse()
        made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
        made.add_special_tokens({"additional_special_tokens": SPECIAL})
        made.chat_template = template
        return made

    return make


def one(prompt, tokenizer, **options):
    (example,) = tokenize_examples([prompt], tokenizer, vocab_size=len(tokenizer), **options)
    return example


def words(example, tokenizer):
    """All tokens, those that are learnt with a star."""
    pieces = tokenizer.convert_ids_to_tokens(list(example.tokens))
    return " ".join(
        f"*{piece}" if learnt else piece for piece, learnt in zip(pieces, example.response_mask, strict=True)
    )


def test_a_text_and_its_response_end_with_the_end_token(sort):
    example = one(Prompt("a", text="31>", data={"response": "13", "level": 2}), sort)
    assert words(example, sort) == "3 1 > *1 *3 *<eos>"
    assert (example.id, example.text, example.data) == ("a", "31>13", {"level": 2})


def test_its_prompt_has_the_tokens_that_it_has_in_reinforcement_learning(sort):
    prompt = Prompt("a", text="31>", data={"response": "13"})
    (sampled,) = tokenize([prompt], sort, vocab_size=16)
    assert one(prompt, sort).tokens[: len(sampled.tokens)] == sampled.tokens


@pytest.mark.parametrize(
    ("response", "learnt"),
    [("13<eos>", "*1 *3 *<eos>"), ("", "*<eos>"), ([1, 3], "*1 *3"), ((1, 3, 11), "*1 *3 *<eos>")],
    ids=["ended-already", "nothing", "tokens", "tokens-with-an-end"],
)
def test_responses_of_other_kinds(sort, response, learnt):
    assert words(one(Prompt("a", tokens=(3, 1, 10), data={"response": response}), sort), sort) == f"3 1 > {learnt}"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt("a", text="3>"), r"(?s)has no response.*prompt a.*no column 'response'.*{response: COLUMN}"),
        (Prompt("a", text="3>", data={"response": None}), "(?s)neither a text nor a list of token ids.*NoneType"),
        (Prompt("a", text="3>", data={"response": []}), "(?s)neither a text nor a list.*list, and it is empty"),
        (Prompt("a", text="3>", data={"response": [1, True]}), "neither a text nor a list"),
        (Prompt("a", text="3>", data={"response": [1, 99]}), "(?s)a token outside of the model's vocabulary.*1 to 99"),
        (Prompt("a", text="3>", data={"response": "\ud800"}), "text that is not valid Unicode"),
        (Prompt("a", text="", data={"response": "3"}), "A prompt has no tokens"),
    ],
)
def test_what_is_no_example_is_refused(sort, prompt, message):
    with pytest.raises(DataError, match=message):
        one(prompt, sort)


def test_a_tokenizer_without_an_end_token_is_refused_only_where_it_is_needed(sort):
    sort.eos_token = None
    assert words(one(Prompt("a", text="3>", data={"response": [3]}), sort), sort) == "3 > *3"
    with pytest.raises(ConfigError, match=r"(?s)no end token.*model.tokenizer.*lists of token ids"):
        one(Prompt("a", text="3>", data={"response": "3"}), sort)


def test_an_answer_to_messages_is_what_the_template_makes_of_it(chat):
    tokenizer = chat(PLAIN)
    example = one(Prompt("a", messages=[HELLO], data={"response": "who are you"}), tokenizer)
    assert words(example, tokenizer) == "<user> hello there <end> | <bot> *who *are *you *<end> *|"
    assert example.text == "<user>hello there<end>|<bot>who are you<end>|"


def test_the_only_answer_needs_no_marks(chat):
    tokenizer, system = chat(PLAIN), {"role": "sys", "content": "a bot"}
    example = one(Prompt("a", messages=[system, HELLO, assistant("who are you")]), tokenizer)
    assert words(example, tokenizer) == (
        "<sys> a bot <end> | <user> hello there <end> | <bot> *who *are *you *<end> *|"
    )


def test_of_several_answers_those_are_learnt_that_the_template_marks(chat):
    tokenizer = chat(MARKED)
    example = one(Prompt("a", messages=[HELLO, assistant("hello"), WHO, assistant("a bot")]), tokenizer)
    assert words(example, tokenizer) == (
        "<user> hello there <end> | <bot> *hello *<end> | <user> who are you <end> | <bot> *a *bot *<end> |"
    )


def test_several_answers_without_marks_are_refused(chat):
    with pytest.raises(ConfigError, match=r"(?s)does not mark the assistant.*no {% generation %}.*endgeneration"):
        one(Prompt("a", messages=[HELLO, assistant("hello"), WHO, assistant("a bot")]), chat(PLAIN))


def test_a_conversation_that_ends_with_a_question_has_no_response(chat):
    with pytest.raises(DataError, match=r"(?s)has no response.*last message has the role 'user'"):
        one(Prompt("a", messages=[HELLO, assistant("hello"), WHO]), chat(MARKED))


def test_a_template_that_marks_nothing_of_a_conversation_teaches_nothing(chat):
    template = MARKED.replace("{% generation %}", "{% if false %}{% generation %}X{% endgeneration %}{% endif %}")
    with pytest.raises(DataError, match=r"(?s)nothing to learn.*marks none"):
        one(Prompt("a", messages=[HELLO, assistant("hello")]), chat(template.replace("{%- endgeneration -%}", "")))


def test_a_template_that_asks_elsewhere_than_it_writes_is_refused(chat):
    with pytest.raises(DataError, match=r"(?s)differently when the answer follows.*'<think>'.*'hello<end>"):
        one(Prompt("a", messages=[HELLO, assistant("hello")]), chat(THINKING))


def test_the_arguments_and_the_tools_reach_the_template(chat):
    template = "{% if tools %}<tool>{% endif %}{% if loud %}there{% endif %}" + PLAIN
    prompt = Prompt("a", messages=[HELLO], data={"response": "a bot"}, tools=[{"type": "function"}])
    tokenizer = chat(template)
    assert words(one(prompt, tokenizer, chat_template_kwargs={"loud": True}), tokenizer).startswith(
        "<tool> there <user> hello there <end> | <bot> *a *bot"
    )


def test_a_first_token_is_never_learnt(chat):
    """Nothing stands before it from which it could be predicted, so that it must not count among tokens either."""
    tokenizer = chat("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    example = one(Prompt("a", messages=[assistant("hello there you")]), tokenizer)
    assert words(example, tokenizer) == "hello *there *you"


def test_a_mixture_has_examples_and_filters_them_by_their_whole_length(sort, tmp_path):
    (tmp_path / "e.csv").write_text("question,answer\n31>,13\n3142>,1234\n31>,31\n31>,13\n")
    options = {"path": str(tmp_path / "e.csv"), "columns": {"prompt": "question", "response": "answer"}}
    data = DataSection(source="csv", options=options, max_prompt_tokens=9, shuffle=False, deduplicate=True)
    mixture = load_mixture(data, sort, seed=0, vocab_size=16, context_length=None, max_new_tokens=None)
    first, second = mixture.draw(2)
    assert [words(example, sort) for example in (first, second)] == ["3 1 > *1 *3 *<eos>", "3 1 > *3 *1 *<eos>"]
    (table,) = mixture.tables
    assert (table.read, table.too_long, table.duplicates) == (4, 1, 1)
    assert mixture.epochs == 1.0


def test_the_context_must_hold_the_whole_example(sort, tmp_path):
    (tmp_path / "e.csv").write_text("prompt,response\n31>,13\n3142>,1234\n")
    data = DataSection(source="csv", options={"path": str(tmp_path / "e.csv")})
    mixture = load_mixture(data, sort, seed=0, vocab_size=16, context_length=6, max_new_tokens=None)
    assert len(mixture) == 1


def test_what_is_learnt_is_a_part_of_the_digest(sort):
    def digest(prompt, response):
        table = load_mixture(
            DataSection(source=f"{__file__}:given", options={"prompt": prompt, "response": response}),
            sort,
            seed=0,
            vocab_size=16,
            context_length=None,
            max_new_tokens=None,
        ).tables[0]
        return table.digest

    assert digest([3, 1], [10, 1]) == digest([3, 1], [10, 1]) != digest([3, 1, 10], [1])


def given(prompt, response):
    return [Prompt("a", tokens=tuple(prompt), data={"response": response})]
