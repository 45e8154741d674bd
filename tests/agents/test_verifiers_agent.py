"""Episodes of verifiers 0.4: its own harness, interception server and tool server, with the model of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError
from anytron_verifiers import prompts, solve
from tests.agents.driving import check_one_conversation, playing, solved
from tests.needs_agents import NEEDS_AGENTS

pytestmark = NEEDS_AGENTS
OPTIONS = {"name": "products-v1", "args": {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}}
TASKSETS = str(Path(__file__).parent / "tasksets")
CALL = '<tool_call>\n{"name": "calculator_multiply", "arguments": {"first": 3, "second": 12}}\n</tool_call>'


@pytest.fixture(autouse=True)
def tasksets(monkeypatch):
    folder = TASKSETS
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")  # of the tool server


def prompt_of(place):
    return list(prompts(**OPTIONS))[place]


def test_rows_are_prompts():
    (first, second) = prompts(**OPTIONS, count=2)
    assert (first.id, second.id) == ("products-v1-0", "products-v1-1")
    assert second.messages == [
        {"role": "system", "content": "multiply"}, {"role": "user", "content": "What is 1 times 12?"}
    ]  # fmt: skip
    assert second.data["answer"] == "12"


@pytest.mark.parametrize(
    ("texts", "max_turns", "reward", "metrics"),
    [
        ([f"let me see\n{CALL}", "36"], 4, 2.0, {"right": 1, "tool_calls": 1, "num_turns": 2, "is_truncated": 0}),
        ([CALL], 1, 0.0, {"right": 0, "tool_calls": 0, "num_turns": 1, "is_truncated": 1}),
    ],
)
def test_an_episode_with_a_tool_is_one_conversation(texts, max_turns, reward, metrics):
    with playing(texts) as server:
        result, session = solved(server, solve, "", prompt_of(3).data, max_turns, **OPTIONS)
        check_one_conversation(server, session, len(texts))
    assert (result.reward, result.metrics) == (reward, metrics)


def test_an_episode_that_fills_the_context_is_scored():
    with playing([]) as server:
        result, session = solved(server, solve, "", {**prompt_of(3).data, "prompt": "word " * 20_000}, **OPTIONS)
    assert (result.reward, session.counts) == (0.0, {"context_length_exceeded": 1})


def test_an_episode_that_the_server_refuses_is_an_error():
    agent = {**OPTIONS["args"]["agent"], "sampling": {"logit_bias": {"5": 1}}}
    with playing([]) as server, pytest.raises(RuntimeError, match=r"ended with an error: .*ProviderError.*logit_bias"):
        solved(server, solve, "", prompt_of(3).data, name=OPTIONS["name"], args={"agent": agent})


def test_an_unknown_taskset_is_refused():
    with pytest.raises(ConfigError, match="The taskset 'nothing-v1' of verifiers cannot be loaded"):
        list(prompts("nothing-v1"))
