"""What a process that runs a user's code writes may be anything: it costs an answer, and never the driver."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.functions import traced
from anytron.config.generation import EnvironmentSection
from anytron.config.scoring import RewardSection
from anytron.task.environments import Observation, Task, Turn
from anytron.task.environments.pool import EnvironmentPool
from anytron.task.environments.worker import Call, Reply
from anytron.task.isolation.failure import Failure
from anytron.task.rewards.answer import LARGEST, Answer
from anytron.task.rewards.answer import Failure as RewardFailure
from anytron.task.rewards.scoring import RewardSum
from tests.core.task.isolation.nonsense import WRITTEN
from tests.core.task.rewards.test_processes import sample

HOSTILE = Path(__file__).with_name("nonsense.py")
NAMES = st.sampled_from(
    [
        "values",
        "failures",
        "failure",
        "observation",
        "what",
        "why",
        "fix",
        "ends",
        "sample",
        "text",
    ]  # as in our answers
) | st.sampled_from(["messages", "tokens", "done", "reward", "metrics", "role"])
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=3)
)
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner),
    max_leaves=12,
)
FAILURES = st.fixed_dictionaries(
    {"what": PLAIN, "why": PLAIN}, optional={"fix": PLAIN, "ends": PLAIN, "sample": st.integers(-1, 3) | PLAIN}
)
ANSWERS = st.fixed_dictionaries(
    {"values": st.lists(st.none() | st.floats() | PLAIN, max_size=4), "failures": st.lists(FAILURES, max_size=3)}
)
REPLIES = st.fixed_dictionaries(
    {"observation": st.dictionaries(NAMES, ANYTHING, max_size=2)}, optional={"failure": FAILURES}
) | st.fixed_dictionaries({"observation": st.fixed_dictionaries({"text": PLAIN, "reward": PLAIN}, optional={})})


def as_written(value):
    return json.loads(json.dumps(value))


@given(ANYTHING | ANSWERS, st.integers(1, 3))
def test_an_answer_of_rewards_is_whole_or_none(record, samples):
    try:
        found = Answer.from_json(as_written(record), samples)
    except ValueError:
        return
    assert found.whole == bool(found.values)
    assert len(found.values) in (0, samples)
    assert all(value is None or (isinstance(value, float) and abs(value) <= LARGEST) for value in found.values)
    assert all(isinstance(text, str) for failure in found.failures for text in (failure.what, failure.why, failure.fix))
    places = [failure.sample for failure in found.failures]
    if found.values:
        assert places == [position for position, value in enumerate(found.values) if value is None]
    else:
        assert len(places) == 1
        assert places[0] is None or 0 <= places[0] < samples


@given(st.dictionaries(NAMES, ANYTHING, max_size=3) | REPLIES, st.sampled_from(["reset", "step", "close"]))
def test_a_reply_of_an_environment_is_whole_or_none(record, method):
    try:
        found = Reply.from_json(as_written(record), Call(0, method))
    except ValueError:
        return
    if found.failure is not None:
        assert all(isinstance(text, str) for text in (found.failure.what, found.failure.why, found.failure.fix))
    elif method == "step":
        seen = found.observation
        assert math.isfinite(seen.reward + sum(seen.metrics.values()))
        assert seen.done or [seen.text, seen.messages, seen.tokens].count(None) == 2


@given(st.integers(0, 2), st.lists(st.floats(-LARGEST, LARGEST), min_size=2, max_size=2))
def test_what_is_right_comes_back(position, numbers):
    failed = RewardFailure("A reward is nan.", "w", "f", sample=position)
    values = [*numbers[:position], None, *numbers[position:]]
    for answer in (Answer(values, [failed]), Answer.failed(failed), Answer([1.0, *numbers], [])):
        assert Answer.from_json(as_written(answer.as_json()), 3) == answer
    said = Observation(messages=[{"role": "tool", "content": "x"}], reward=numbers[0], metrics={"a": 1.0})
    assert Reply.from_json({"observation": as_written(said.as_json())}, Call(0, "step")) == Reply(said)


def test_a_traceback_is_text_that_can_be_written():
    assert traced(ValueError("\ud800")) == "ValueError: \\ud800"


@pytest.mark.slow
def test_nonsense_of_a_reward_costs_its_sample_and_no_other(tmp_path):
    section = RewardSection(function=f"{HOSTILE}:lengths", timeout_s=60.0)
    right = {0: "abc", 7: "ab"}
    words = [*WRITTEN, "huge"]
    samples = [sample(right.get(index) or words.pop(), index) for index in range(len(WRITTEN) + 1 + len(right))]
    with RewardSum.from_config([section]).start(tmp_path / "logs", start_timeout_s=120) as score:
        scores = score(samples)
    assert scores.total[[*right]].tolist() == [3, 2]
    failures = {samples[index].response_text: failure for index, failure in scores.failures["lengths"].items()}
    assert failures.keys() == {*WRITTEN, "huge"}
    huge = failures.pop("huge")
    assert huge.what == "A reward process died.", "nobody waits for what no memory holds"
    assert "wrote an incomplete message" in huge.why
    for word, failure in failures.items():
        assert failure.what == "A reward process sent an invalid answer.", word
        assert failure.why.startswith("it wrote "), word


def test_an_answer_that_is_forged_moves_no_other(tmp_path):
    """Code that a reward runs answers before the reward does, with as many numbers as there are samples."""
    section = RewardSection(function=f"{HOSTILE}:forges", timeout_s=60.0)
    with RewardSum.from_config([section]).start(tmp_path / "logs", start_timeout_s=120) as score:
        first = score([sample("abc"), sample("before", 1), sample("ab", 2)])
        assert first.total[[0, 2]].tolist() == [3, 2]
        (failure,) = first.failures["forges"].values()
        assert failure.what == "A reward process sent an invalid answer."
        assert "answer to no call" in failure.why
        assert score([sample("abcd"), sample("a", 1), sample("abcde", 2)]).total.tolist() == [4, 1, 5]


def test_what_is_written_between_calls_answers_none_and_costs_nothing(tmp_path):
    section = RewardSection(function=f"{HOSTILE}:forges", timeout_s=60.0)
    with RewardSum.from_config([section]).start(tmp_path / "logs", start_timeout_s=120) as score:
        answered = tmp_path / "answered"
        assert score([sample("after", answered=answered), sample("ab", 1)]).total.tolist() == [5, 2]
        answered.touch()
        (process,) = score.pools[0]._processes
        assert process.connection.poll(60)  # it is there before the next call
        found = score([sample("abcd"), sample("a", 1)])
    assert found.total.tolist() == [4, 1]
    assert found.failures == {"forges": {}}


def test_nonsense_of_an_environment_costs_its_conversation_and_no_other(tmp_path):
    section = EnvironmentSection(path=f"{HOSTILE}:Echo", processes=1, timeout_s=60.0)
    words = ["a list", "other kinds", "numbers for texts", "beyond floats", "an answer with a token", "still here"]
    with EnvironmentPool(section, tmp_path / "logs", start_timeout_s=120) as pool:
        said = {pool.begin(Task("p", "x", {}, seed=0, max_turns=8)): word for word in words}
        for number, word in said.items():
            pool.step(number, Turn(word, (1,), finished=True))
        found = {}
        while pool.busy:
            found |= {said[number]: answer for number, answer in pool.poll(1.0)}
    assert found.pop("still here") == Observation(text="still here")
    assert found.keys() == {*words} - {"still here"}
    for failure in found.values():
        assert isinstance(failure, Failure)
        assert (failure.what, failure.ends) == ("An environment process sent an invalid answer.", True)
