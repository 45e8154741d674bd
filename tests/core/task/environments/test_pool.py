"""Environments in their processes: what one that misbehaves costs, and what becomes of those beside it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError, DataError
from anytron.config.generation import EnvironmentSection
from anytron.task.environments import Observation, Task, Turn
from anytron.task.environments.pool import MOST_CALLS, EnvironmentPool, check_environment
from anytron.task.environments.worker import Call, answer
from anytron.task.isolation.failure import Failure
from anytron.task.isolation.process import IsolatedProcess
from tests.core.task.environments.faulty import SLOW_S

FAULTY = Path(__file__).with_name("faulty.py")


def turn(text: str) -> Turn:
    return Turn(text, (1,), finished=True)


@pytest.fixture
def start(tmp_path):
    """Start the processes of faulty.py's environment; they end with the test."""
    with contextlib.ExitStack() as stack:

        def make(name="Counter", **settings):
            section = EnvironmentSection(path=f"{FAULTY}:{name}", **settings)
            return stack.enter_context(EnvironmentPool(section, tmp_path / "logs", start_timeout_s=60))

        yield make


def drain(pool) -> dict:
    """Wait until every call is answered."""
    found = {}
    while pool.busy:
        found |= dict(pool.poll(1.0))
    return found


def begin(pool, count: int) -> list[int]:
    return [pool.begin(Task(f"p{index}", "31>", {"answer": "13"}, seed=index, max_turns=8)) for index in range(count)]


def say(pool, texts: dict[int, str]) -> dict:
    for number, text in texts.items():
        pool.step(number, turn(text))
    return drain(pool)


def heard(answer) -> str:
    """What an environment said, without its random number."""
    assert isinstance(answer, Observation), answer
    return answer.text.rpartition(":")[0]


@pytest.mark.parametrize("processes", [1, 3])
def test_each_conversation_has_an_environment_of_its_own(start, processes):
    pool = start(processes=processes, options={"sign": "!"})
    numbers = begin(pool, 5)
    for round_ in (1, 2):
        answers = say(pool, {number: f"t{number}" for number in reversed(numbers)})
        assert {number: heard(answers[number]) for number in numbers} == {
            number: f"p{index}!{round_}:t{number}" for index, number in enumerate(numbers)
        }
    assert len({answer.metrics["pid"] for answer in answers.values()}) == processes
    assert say(pool, {numbers[2]: "end"}) == {numbers[2]: Observation(done=True, reward=1.0, metrics={"ends": 1.0})}


FAULTS = {
    "raises": ("An environment's method step raised an exception.", "LookupError: no opinion"),
    "exits": ("An environment's method step tried to end its process.", "SystemExit: 3"),
    "dies": ("An environment process died.", "status 7"),
    "hangs": ("An environment took too long.", "in hangs"),
    "eats": ("An environment's method step ran out of memory.", "MemoryError"),
    "returns_a_text": (
        "An environment's method step returned an invalid value.",
        "it returned str, not an Observation",
    ),
    "says_nothing": ("An environment's method step raised an exception.", "this one has none"),
    "gives_nan": ("An environment's method step raised an exception.", "reward is nan, not a finite number"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_conversation_and_no_other(start, fault):
    pool = start(timeout_s=20 if fault == "eats" else 1.0, memory_gib=0.4 if fault == "eats" else None)
    numbers = begin(pool, 3)
    first = say(pool, dict.fromkeys(numbers, "a"))
    answers = say(pool, {numbers[0]: "b", numbers[1]: fault, numbers[2]: "b"})
    what, why = FAULTS[fault]
    failure = answers[numbers[1]]
    assert isinstance(failure, Failure)
    assert failure.what == what
    assert why in failure.why
    for index in (0, 2):
        assert heard(answers[numbers[index]]) == f"p{index}#2:b"  # it remembers its first turn, in whatever process
    other = answers[numbers[2]].metrics["pid"] != first[numbers[2]].metrics["pid"]
    assert other == failure.ends
    assert heard(say(pool, {numbers[0]: "c"})[numbers[0]]) == "p0#3:c"
    (new,) = begin(pool, 1)
    assert heard(say(pool, {new: "a"})[new]) == "p0#1:a"


@pytest.fixture
def sent(monkeypatch):
    """How many calls each message to a process has."""
    counts, send = [], IsolatedProcess.send

    def counting(process, calls):
        counts.append(len(calls))
        send(process, calls)

    monkeypatch.setattr(IsolatedProcess, "send", counting)
    return counts


def test_the_calls_that_wait_for_a_process_are_one_message(start, sent):
    pool, count = start(), MOST_CALLS + 6
    numbers = begin(pool, count)
    drain(pool)
    answers = say(pool, dict.fromkeys(numbers, "a"))
    assert [heard(answers[number]) for number in numbers] == [f"p{index}#1:a" for index in range(count)]
    assert sent == [MOST_CALLS, 6] * 2
    answers = say(pool, dict.fromkeys(numbers, "b") | {numbers[3]: "dies", numbers[-1]: "raises"})
    assert answers.pop(numbers[3]).what == "An environment process died."
    assert answers.pop(numbers[-1]).what == "An environment's method step raised an exception."
    assert {heard(answer).partition("#")[2] for answer in answers.values()} == {"2:b"}
    assert len(answers) == count - 2


def test_time_that_others_take_in_the_same_message_does_not_count(start):
    pool = start(timeout_s=2.5 * SLOW_S)
    *slow, hanging = begin(pool, 4)
    drain(pool)
    answers = say(pool, dict.fromkeys(slow, "slow") | {hanging: "hangs"})
    assert answers.pop(hanging).what == "An environment took too long."
    assert answers == dict.fromkeys(slow, Observation(text="late"))


def test_what_conversations_share_in_the_driver_they_do_not_share_in_their_process(start):
    pool, data = start(), {"notes": ["question"]}
    numbers = [pool.begin(Task(f"p{index}", "31>", data, seed=index, max_turns=8)) for index in range(2)]
    answers = say(pool, dict.fromkeys(numbers, "note"))
    said = [[message["content"] for message in answers[number].messages] for number in numbers]
    assert said == [["question", "p0"], ["question", "p1"]]


@pytest.mark.parametrize("fault", ["raises", "exits"])
def test_a_conversation_fails_once_though_its_next_call_was_in_the_same_message(start, sent, fault):
    pool = start(options={"fail_at_reset": fault})
    numbers = begin(pool, 2)
    for number in numbers:
        pool.step(number, turn("a"))
    found = []
    while pool.busy:
        found += pool.poll(1.0)
    assert sent[0] == 4
    assert [(number, answer.what) for number, answer in found] == [
        (number, FAULTS[fault][0].replace("step", "reset")) for number in numbers
    ]


def test_environments_that_are_made_again_must_repeat_themselves(start):
    pool = start(options={"forgetful": True})
    numbers = begin(pool, 2)
    say(pool, dict.fromkeys(numbers, "a"))
    answers = say(pool, {numbers[0]: "dies"})
    assert answers[numbers[0]].what == "An environment process died."
    assert answers[numbers[1]].what == "An environment answered differently when its calls were repeated."
    assert re.search(r"step\(\) returned .*p1#1:a:0\.\d+.* and before .*p1#1:a:0\.\d+", answers[numbers[1]].why)


def test_a_process_that_is_lost_between_two_calls_is_replaced(start):
    pool = start()
    numbers = begin(pool, 2)
    pid = int(say(pool, dict.fromkeys(numbers, "a"))[numbers[0]].metrics["pid"])
    subprocess.run(["kill", "-9", str(pid)], check=True)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
    answers = say(pool, dict.fromkeys(numbers, "b"))
    assert [heard(answers[number]) for number in numbers] == ["p0#2:b", "p1#2:b"]


def test_conversations_are_closed_once_and_their_environments_forgotten(start, tmp_path):
    pool = start(options={"closed": str(tmp_path / "closed")})
    numbers = begin(pool, 2)
    say(pool, {numbers[0]: "a", numbers[1]: "raises"})
    for number in numbers:
        pool.end(number)
    assert drain(pool) == {}
    assert sorted((tmp_path / "closed").read_text().split()) == ["p0", "p1"]


class LeavesInClose:
    def reset(self, task): ...

    def step(self, turn):
        raise ValueError("a fault of the environment")

    def close(self):
        raise SystemExit


def test_a_process_that_close_ends_after_a_failure_is_replaced():
    environments = {}
    answer(Call(0, "reset"), environments, LeavesInClose)
    failure = answer(Call(0, "step"), environments, LeavesInClose)["failure"]
    assert ("a fault of the environment" in failure["why"], failure["ends"]) == (True, True)
    assert environments == {}


def test_an_answer_that_takes_long_does_not_hold_up_who_polls(start):
    pool = start(timeout_s=60)
    (number,) = begin(pool, 1)
    drain(pool)
    pool.step(number, turn("hangs"))
    began = time.monotonic()
    assert pool.poll(0.05) == []
    assert time.monotonic() - began < 5
    assert pool.busy


def test_a_class_that_cannot_be_made_again_in_its_process_ends_the_run_with_the_reason(tmp_path, monkeypatch):
    code = "import os\nif os.getenv('IN_WORKER'): raise ImportError('not here')\n"
    (tmp_path / "e.py").write_text(code + "class E:\n    def reset(self, task): ...\n    def step(self, turn): ...\n")
    section = EnvironmentSection(path=f"{tmp_path}/e.py:E")
    check_environment(section)
    monkeypatch.setenv("IN_WORKER", "1")
    with EnvironmentPool(section, tmp_path / "logs", 60) as pool:
        begin(pool, 1)
        with pytest.raises(DataError, match=r"(?s)An environment process could not start.*environment\.path.*not here"):
            drain(pool)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Nobody", {}, r"has no 'Nobody'.*environment\.path"),
        ("NoStep", {}, r"method step is missing.*NoStep, line \d+ of .*faulty\.py, has no method step\(self, turn\)"),
        ("Counter", {"sing": "!"}, r"environment\.path, with its options.*'sing'.*Counter, line \d+ of .*faulty\.py"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_starts(name, options, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_environment(EnvironmentSection(path=f"{FAULTY}:{name}", options=options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "has none"),
        ({"text": "a", "tokens": [1]}, "has text and tokens"),
        ({"text": "a", "done": True}, "done=True must have none"),
        ({"text": 3}, "text has the type int, not str"),
        ({"tokens": "31"}, "not a list of integers"),
        ({"messages": [3]}, "not a list of mappings"),
        ({"done": True, "metrics": {"a": "b"}}, "a is 'b', not a finite number"),
    ],
)
def test_an_observation_is_checked_where_it_is_made(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Observation(**arguments)


def test_a_worker_imports_no_torch():
    program = "import anytron.task.environments.worker, anytron.config.imports, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
