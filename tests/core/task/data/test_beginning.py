"""What a run reads from the clock: rendered as transformers would in the locale C, wherever and whenever it is read."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from anytron.task.data.beginning import Beginning

MOMENTS = st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2100, 1, 1))
OFFSETS = st.integers(min_value=-14 * 60, max_value=14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
FORMATS = st.lists(
    st.one_of(
        st.sampled_from("aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ%").map("%{}".format),
        st.sampled_from(["%-d", "%-m", "%_d", "%^a", "%^B", "%Ey", "%Od", "%EY", ", ", "Today ", "\u65e5"]),
    ),
    max_size=5,
).map("".join)


@given(MOMENTS, OFFSETS, FORMATS)
def test_it_renders_what_the_library_does_in_the_locale_c(moment, offset, form):
    """The tests' own process never asks for another locale."""
    assert Beginning(now=moment.replace(tzinfo=offset)).strftime(form) == moment.strftime(form)


@pytest.fixture
def elsewhere(monkeypatch):
    """The process is in another time zone."""

    def move(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


def test_neither_time_zone_nor_file_changes_it(elsewhere):
    elsewhere("Asia/Kolkata")
    began = Beginning.of(SimpleNamespace(chat_template="{{ strftime_now('%H') }}"))
    wanted = began.strftime("%c, %s, %j")
    for zone in ("America/Los_Angeles", "Pacific/Kiritimati"):
        elsewhere(zone)
        read = Beginning.model_validate_json(began.model_dump_json())
        assert read.now.isoformat() == began.now.isoformat()
        assert read.strftime("%c, %s, %j") == wanted


def test_names_are_not_the_locales():
    """What another locale would write is what the C library gives for these directives: none is asked for."""
    asked = []

    class Wall(datetime):
        def replace(self, **_):
            return self

        def strftime(self, form):
            asked.append(form)
            return "?"

    began = Beginning.model_construct(now=Wall(2026, 11, 25, 14, tzinfo=timezone.utc))
    assert began.strftime("%A %a %B %b %h %p %P") == "Wednesday Wed November Nov Nov PM pm"
    assert asked == []
    began.strftime("%c %x %X %r")
    assert {form[-1] for form in asked}.isdisjoint("cxXrpaAbB")


def rendered(template, arguments, **given):
    """By transformers, whose own clock may not be read."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, **arguments, **given)


NOW = datetime(2026, 11, 5, 8, 7, 6, tzinfo=timezone(timedelta(hours=3)))
ASKS = "{{ strftime_now(form) }}"


@given(FORMATS)
def test_a_template_reads_it_whatever_format_it_asks_for(form):
    began = Beginning(now=NOW, chat_template=ASKS)
    assert rendered(ASKS, began.arguments({"form": form})) == began.strftime(form)


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d %b') }}|{{ messages[0].content }}",
        "\n\n  {% if true %}\n {{ strftime_now('100%% %-d') }}\n{% endif %}\n",
        "{%- if strftime_now is defined -%}{%- set d = strftime_now('%B') -%}{%- endif %} {{ d }}",
        "{% macro head() %}{{ strftime_now('%c') }}{% endmacro %}{{ head() }}",
        {"default": "{{ strftime_now('%d') }}", "tool_use": "{{ strftime_now('%H') }}{{ tools|length }}"},
        {"default": "  {% if true %}d{% endif %}", "rag": "{{ strftime_now('%M') }}"},
    ],
)
@pytest.mark.parametrize("given", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_the_rest_of_a_template_is_as_it_was(monkeypatch, template, given):
    """Spaces, lines and the choice among templates: the same as with transformers' clock at that moment."""
    began = Beginning(now=NOW, chat_template=template)
    ours = rendered(template, began.arguments({}), **given)
    assert rendered(template, Beginning(now=NOW + timedelta(days=1), chat_template=template).arguments({}), **given)

    class Then(datetime):
        @classmethod
        def now(cls):
            return NOW.replace(tzinfo=None)

    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    assert ours == rendered(template, {}, **given)


def test_only_a_template_that_asks_for_the_clock_gets_one():
    plain = Beginning(now=NOW, chat_template="{{ messages }}")
    assert plain.arguments({"a": 1}) == {"a": 1}
    assert not plain.reads_the_clock
    dated = Beginning(now=NOW, chat_template="{{ strftime_now('%d %b %Y') }}{{ strftime_now(\"%H\") }}")
    assert dated.shown == {"%d %b %Y": "05 Nov 2026", "%H": "08"}
    assert dated.reads_the_clock
    named = Beginning(now=NOW, chat_template={"default": "-", "own": "{{ strftime_now('%d') }}"})
    assert rendered(named.chat_template, named.arguments({"chat_template": "own"})) == "05"
    assert rendered("-", plain.arguments({"chat_template": "{{ strftime_now('%d') }}!"})) == "05!"
