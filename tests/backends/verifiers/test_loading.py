"""Which verifiers is accepted, and how tool calls are read; the library itself is not needed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from anytron.base.errors import ConfigError
from anytron.config.schema import DataSection
from anytron.task.data.sources import load_prompts
from anytron_verifiers import release
from anytron_verifiers.messages import FORMATS, plain
from anytron_verifiers.release import EPISODES, TURNS


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a version is installed; None = none."""

    def pretend(found):
        def version(name):
            if found is None:
                raise PackageNotFoundError(name)
            return found

        monkeypatch.setattr(release, "version", version)

    return pretend


@pytest.mark.parametrize(
    ("found", "why"),
    [(None, "verifiers is not installed"), ("0.1.14", "verifiers 0.1.14 is installed, not <0.4,>=0.2.1")],
)
def test_another_verifiers_is_refused_by_name(found, why, installed):
    installed(found)
    with pytest.raises(ConfigError, match=why) as caught:
        list(load_prompts(DataSection(source="anytron_verifiers:prompts", options={"name": "gsm8k"})))
    assert caught.value.fix == "pip install 'verifiers<0.4,>=0.2.1', with Python 3.11 or newer"


@pytest.mark.parametrize(
    ("found", "wanted", "other"),
    [("0.4.0", TURNS, "agent: anytron_verifiers:solve"), ("0.3.1", EPISODES, "path: anytron_verifiers:Verifiers")],
)
def test_the_adapter_of_another_version_is_named(found, wanted, other, installed):
    installed(found)
    with pytest.raises(ConfigError) as caught:
        release.require(wanted)
    assert f"' by 'environment.{other}" in caught.value.fix


@pytest.mark.parametrize(
    ("found", "wanted"),
    [("0.2.1", TURNS), ("0.3.0", TURNS), ("0.3.1", TURNS), ("0.3.2.dev4", TURNS), ("0.4.0", EPISODES)],
)
def test_the_versions_that_were_tried_are_accepted(found, wanted, installed):
    installed(found)
    release.require(wanted)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ('so <tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>', "so ", [("f", '{"x": "é"}')]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>', None, []),
        ('<tool_call>{"name": "f"}</tool_call>', None, []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
        ("<tool_call>[1]</tool_call>", None, []),
        (f"<tool_call>{'[' * 100_000}</tool_call>", None, []),
    ],
)
def test_tool_calls_are_read_or_the_text_stays_as_it_is(text, content, calls):
    assert FORMATS["hermes"](text) == (text if content is None else content, calls)


def test_messages_are_text():
    parts = [{"type": "text", "text": "see "}, {"type": "text", "text": "here"}]
    assert plain({"role": "user", "content": parts, "name": None}) == {"role": "user", "content": "see here"}
    with pytest.raises(ValueError, match="a message has image_url; only text"):
        plain({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
