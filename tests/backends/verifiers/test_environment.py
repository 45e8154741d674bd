"""Environments of the real verifiers, turn by turn."""

from __future__ import annotations

import json
import signal

import pytest

from anytron.base.errors import ConfigError
from anytron.config.generation import EnvironmentSection
from anytron.task.data.prompts import tokenize
from anytron.task.environments import Observation, Task, Turn
from anytron.task.environments.pool import EnvironmentPool, check_environment
from anytron_verifiers import VerifiersEnvironment, prompts
from tests.backends.verifiers import characters
from tests.needs_verifiers import NEEDS_VERIFIERS

pytestmark = NEEDS_VERIFIERS
TOYS = "tests.backends.verifiers.toys"


def turn(text: str, *, finished: bool = True) -> Turn:
    return Turn(text, tuple(range(len(text))), finished=finished)


def row(kind: str, index: int):
    return list(prompts(TOYS, {"kind": kind}))[index]


def begun(kind: str, index: int, max_turns: int = 8) -> VerifiersEnvironment:
    environment = VerifiersEnvironment(TOYS, {"kind": kind})
    environment.reset(Task("p", "?", row(kind, index).data, seed=1, max_turns=max_turns))
    return environment


def call(first: object, second: object) -> str:
    asked = {"name": "multiply", "arguments": {"first": first, "second": second}}
    return f"<tool_call>{json.dumps(asked)}</tool_call>"


def test_conversations_of_each_kind_in_one_process(tmp_path):
    """Two at a time: they share the process's environment and event loop, and nothing else."""
    section = EnvironmentSection(
        path="anytron_verifiers:VerifiersEnvironment", options={"name": TOYS, "args": {"kind": "guess"}}
    )
    check_environment(section)
    with EnvironmentPool(section, tmp_path, start_timeout_s=120) as pool:
        numbers = [pool.begin(Task(f"p{i}", "?", row("guess", i).data, seed=i, max_turns=8)) for i in (3, 6)]

        def say(*texts: str) -> list[Observation]:
            for number, text in zip(numbers, texts, strict=True):
                pool.step(number, turn(text))
            answers: dict = {}
            while pool.busy:
                answers |= dict(pool.poll(1.0))
            return [answers[number] for number in numbers]

        up, down = ([{"role": "user", "content": word}] for word in ("up", "down"))
        assert [one.messages for one in say("1", "1")] == [up, up]
        assert [one.messages for one in say("5", "5")] == [down, up]
        first, second = say("3", "8")
        assert (first.done, first.reward, first.metrics["num_turns"]) == (True, pytest.approx(1 / 3 + 0.5), 3)
        assert first.metrics["sooner"] == pytest.approx(1 / 3)
        assert second.messages == down


@pytest.mark.parametrize(("answer", "reward"), [("4", 1.0), ("5", 0.0)])
def test_a_single_turn_is_scored_by_the_rubric(answer, reward):
    observation = begun("single", 2).step(turn(answer))
    assert observation == Observation(done=True, reward=reward, metrics={"right": reward, "num_turns": 1.0})


def test_a_group_of_environments_sends_each_row_to_its_own():
    assert begun("mixed", 2).step(turn("4")).metrics["right"] == 1.0
    guess = begun("mixed", 4 + 3)
    assert guess.step(turn("1")).messages == [{"role": "user", "content": "up"}]
    assert guess.step(turn("3")).metrics["sooner"] == 0.5


def test_a_tool_is_called_and_its_calls_are_counted():
    environment = begun("tool", 3)
    shown = environment.step(turn(f"first {call(3, 12)}{call(1, 1)}"))
    assert [(one["role"], one["content"]) for one in shown.messages] == [("tool", "36"), ("tool", "1")]
    assert len({one["tool_call_id"] for one in shown.messages}) == 2
    shown = environment.step(turn(call("x", None)))
    assert "can't multiply" in shown.messages[0]["content"]
    ended = environment.step(turn("36"))
    assert (ended.done, ended.reward) == (True, 2.0)
    assert {"right": 1.0, "num_turns": 3.0, "multiply_calls": 3.0}.items() <= ended.metrics.items()


def test_what_looks_like_a_tool_call_is_an_answer_where_there_are_no_tools():
    assert begun("single", 2).step(turn(call(3, 12))).metrics["right"] == 0.0


def test_the_last_turn_is_scored_though_the_environment_would_go_on():
    environment = begun("guess", 3, max_turns=2)
    assert environment.step(turn("1")).reward == 0.0
    last = environment.step(turn("7"))
    assert not last.done
    assert (last.reward, last.metrics["num_turns"]) == (0.5, 2)


def test_tools_are_shown_in_the_prompt_and_the_dataset_is_the_environments(tmp_path):
    given = list(prompts(TOYS, {"kind": "tool"}, count=2))
    assert [one.text for one in tokenize(given, characters.tokenizer(), vocab_size=characters.VOCABULARY)] == [
        "[multiply]u:0*12;>",
        "[multiply]u:1*12;>",
    ]
    assert given[1].tools[0]["function"]["parameters"]["required"] == ["first", "second"]
    assert [one.messages[0] for one in prompts(TOYS, {"kind": "single"})] == [{"role": "system", "content": "add"}] * 4


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("crash", RuntimeError, "the table fell over"),
        ("rewrite", ValueError, "changed earlier messages"),
        ("paint", ValueError, "a message has image_url"),
    ],
)
def test_what_cannot_be_followed_is_an_error_of_its_sample_and_cleaned_up(text, error, message):
    from tests.backends.verifiers.toys import CLEANED

    environment = begun("guess", 3)
    environment.step(turn("1"))
    CLEANED.clear()
    with pytest.raises(error, match=message):
        environment.step(turn(text))
    assert CLEANED == [3]


def test_an_environment_that_begins_elsewhere_is_refused():
    with pytest.raises(ValueError, match="did not start with the prompt"):
        begun("moves_the_prompt", 0)


def test_a_conversation_that_is_given_up_is_cleaned_up():
    from tests.backends.verifiers.toys import CLEANED

    environment = begun("guess", 3)
    environment.step(turn("1"))
    CLEANED.clear()
    environment.close()
    assert CLEANED == [3]


@pytest.mark.parametrize(
    ("kind", "message"), [("group", "scores the responses to a prompt together"), ("nothing", "cannot be loaded")]
)
def test_an_environment_that_cannot_be_used_is_refused_before_anything_starts(kind, message):
    with pytest.raises(ConfigError, match=message):
        list(prompts(TOYS, {"kind": kind}))


def test_loading_an_environment_leaves_the_runs_signals_alone(monkeypatch):
    mine = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        list(prompts(TOYS, {"kind": "single"}))
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGTERM, mine)
