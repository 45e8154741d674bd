"""Agents over real HTTP: a real server, real processes, the real pool, and an engine that plays.

The oracle is the environment of examples/calculator.py in :mod:`tests.core.run.rollout.test_conversations`: an agent
that does the same gives the same responses, token by token.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from anytron.base.errors import ConfigError, DataError
from anytron.config.generation import EndpointLimits, EnvironmentSection
from anytron.config.schema import RunConfig
from anytron.run.rollout.agents import Agents
from anytron.run.rollout.endpoint import endpoint_key, open_endpoint
from anytron.run.rollout.turns import turns_of
from anytron.serving.keys import KEY_VARIABLE
from anytron.task.environments.pool import EnvironmentPool, check_environment
from anytron.workers.engines.rollout_engine import SamplingParams
from tests.core.run.rollout import toy_agents
from tests.core.run.rollout.pupil import QUESTIONS, Pupil, Training, asked, product, prompt
from tests.core.run.rollout.replicas import Executor, pool_of, weights

AGENTS = toy_agents.__file__


def config_of(environment):
    limits = EndpointLimits()
    rollout = SimpleNamespace(engine="transformers", endpoint=None, options={}, endpoint_limits=limits)
    return SimpleNamespace(engine=SimpleNamespace(name="megatron"), environment=environment, rollout=rollout)


@pytest.fixture
def answer(tmp_path, tokenizer):
    """Have agents answer all questions of the pupil, ``count`` times each."""
    with contextlib.ExitStack() as stack:

        def make(
            seed=0, count=2, context_length=None, replicas=2, agent="solve", disturb=lambda *arguments: None, **section
        ):
            def engine(number, order):
                pupil = Pupil(order)
                pupil.tokenizer = tokenizer
                return pupil

            executor = Executor(seed, engine)
            pool = pool_of(executor, replicas)
            pool.load_weights(weights(1))
            named = {} if "command" in section else {"agent": f"{AGENTS}:{agent}"}
            settings = EnvironmentSection(**named, **{"processes": 2, **section})
            environments = stack.enter_context(EnvironmentPool(settings, tmp_path / "logs", 60))
            prepared = SimpleNamespace(
                tokenizer=tokenizer,
                sampling=SamplingParams(max_new_tokens=8, min_new_tokens=1, stop=("*",)),
                context_length=context_length,
                vocab_size=17,
                vision=None,
                chat_template_kwargs={},
            )
            config = config_of(settings)
            endpoint = stack.enter_context(open_endpoint(config, prepared, endpoint_key(config), print))
            pool.guests = endpoint.desk
            turns = turns_of(config, prepared, pool, environments, endpoint)
            assert isinstance(turns, Agents)
            begun = turns.begin([prompt(tokenizer, question) for question in QUESTIONS], count, seed=5)
            disturb(turns, pool, executor)
            found = turns.finish(begun)
            assert not endpoint._keys._sessions
            return found, [request for group in executor.groups for request in group.engine.seen]

        yield make


def plain(found):
    """Responses without routing, which is compared by itself, and without the prompt that an agent sends."""
    return [replace(one, routing=None, prompt=None) for one in chain.from_iterable(found)]


@pytest.mark.parametrize(("seed", "processes", "replicas"), [(0, 1, 1), (1, 5, 3)])
def test_an_agent_gives_the_responses_of_the_environment_that_does_the_same(
    answer,
    converse,
    tokenizer,
    seed,
    processes,
    replicas,
):
    expected, _ = converse()
    found, requests = answer(seed=seed, processes=processes, replicas=replicas)
    assert plain(found) == plain(expected)
    for one, other in zip(chain.from_iterable(found), chain.from_iterable(expected), strict=True):
        assert torch.equal(one.routing, other.routing)
    for question, group in zip(QUESTIONS, found, strict=True):
        assert {response.prompt for response in group} == {prompt(tokenizer, question).tokens}
    assert len({request.seed for request in requests}) == len(requests) == 20
    others, _ = answer(agent="asynchronous")  # the twin: another agent gives other responses
    assert plain(others) != plain(expected)
    assert {response.environment.reward for group in others for response in group} == {5.0}


FAULTS = {
    "raises": "no opinion",
    "exits": "SystemExit",
    "dies": "exited with status 4",
    "hangs": "more than 3 s",
    "no reward": "no reward was returned",
    "text": "it is a str",
    "nan": "not a finite number",
    "edits": "history_not_recorded",
    "colder": "other_sampling",
    "seeds": "other_sampling",
    "other key": "invalid_api_key",
}


@pytest.mark.some(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_agent_that_fails_costs_its_sample_and_no_other(answer, fault):
    slow = {"timeout_s": 3.0} if fault == "hangs" else {}
    found, _ = answer(agent="choosy", options={"fault": fault}, **slow)
    for question, group in zip(QUESTIONS, found, strict=True):
        for response in group:
            failure = response.environment.failure
            if question == "9012":
                assert failure is not None
                assert FAULTS[fault] in failure.why
                assert not response.finished
            else:
                assert failure is None
                assert response.environment.reward == 1.0


def check_conversations(found, requests, conversations):
    """Check that responses hold all conversations, and that each answer is the model's own in exactly one of them."""
    lines = []
    for response in found:
        assert response.environment.failure is None
        assert len(response.others) == conversations - 1
        for one in (response, *response.others):
            lines.append(((*one.prompt, *one.tokens), [False] * len(one.prompt) + list(one.response_mask)))
            assert len(one.versions) == sum(one.response_mask)
            assert all(bool(value) == own for value, own in zip(one.log_probs, one.response_mask, strict=True))
            assert (one is response) == (one.environment is not None)
            whole = (*one.prompt, *one.tokens)
            assert one.routing[:, 0, 0].tolist() == list(whole[:-1])
    begun = 0
    for request in requests:
        prompt = request.prompt.tokens
        own = [mask[len(prompt)] for tokens, mask in lines if tokens[: len(prompt)] == prompt]
        begun += any(own)
        assert sum(own) >= 1
    assert begun == len(requests)
    starts = sum(own and not before for _, mask in lines for own, before in zip(mask, [False, *mask], strict=False))
    assert starts == len(requests)


def test_each_conversation_of_an_agent_is_trained_and_each_answer_once(answer):
    found, requests = answer(agent="branching", count=1)
    responses = list(chain.from_iterable(found))
    assert len(requests) == 5 * len(responses)
    check_conversations(responses, requests, 4)
    assert {response.environment.reward for response in responses} == {0.5}
    assert {len(response.environment.turns) for response in responses} == {2}
    for sabotage in (
        lambda one: (one.others[1], *one.others[1:]),  # a conversation is lost
        lambda one: (one.others[0], replace(one, environment=None, others=()), one.others[2]),  # what is shared counts
    ):
        with pytest.raises(AssertionError):
            check_conversations([replace(one, others=sabotage(one)) for one in responses], requests, 4)


def test_a_key_ends_with_its_agent(answer, tmp_path):
    answer(agent="tells", options={"file": str(tmp_path / "told")})
    url, key = json.loads((tmp_path / "told").read_text())
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{url}/models", headers=headers, trust_env=False).status_code == 401


def test_an_agent_that_never_asks_ends_the_run(answer):
    with pytest.raises(DataError, match="did not ask the model anything"):
        answer(agent="silent")


def test_limits_cut_a_response_off_and_do_not_fail_it(answer):
    found, requests = answer(agent="talkative", max_turns=3)
    assert len(requests) == 3 * 10
    for response in chain.from_iterable(found):
        assert response.environment.failure is None
        assert (response.finished, response.environment.reward, len(response.environment.turns)) == (False, 0.0, 3)
    found, _ = answer(agent="talkative", max_turns=50, context_length=16)
    for response in chain.from_iterable(found):
        assert response.environment.failure is None
        assert not response.finished
        assert len(response.prompt) + len(response.tokens) <= 16


def test_an_agent_that_fails_is_started_again_with_another_session(answer, tmp_path):
    (tmp_path / "tried").mkdir()
    options = {"directory": str(tmp_path / "tried")}
    found, requests = answer(agent="flaky", options=options, attempts=2, processes=1, count=1)
    assert [response.environment.failure for response in chain.from_iterable(found)] == [None] * 5
    assert len({request.seed for request in requests}) == len(requests) == 10


def test_rewards_come_by_http_from_functions_and_programs(answer):
    found, _ = answer(agent="by_post")
    outcomes = [response.environment for response in chain.from_iterable(found)]
    assert {(one.reward, one.metrics["sent"]) for one in outcomes} == {(0.25, 2.0)}
    found, _ = answer(command=[sys.executable, AGENTS])
    for question, group in zip(QUESTIONS, found, strict=True):
        for response in group:
            if question == "9012":
                assert "ended with status 5" in response.environment.failure.why
            else:
                assert response.environment.reward == len(product(question))


def test_a_first_request_that_is_too_long_says_so(answer):
    with pytest.raises(DataError, match="first request is too long"):
        answer(context_length=5)


@pytest.mark.slow
def test_agents_get_the_time_in_which_the_driver_is_elsewhere(answer):
    def score_rewards(turns, pool, executor):
        begun = asked(executor)
        turns.attend(Training(lambda: asked(executor) > begun))  # agents are running
        time.sleep(4)

    found, _ = answer(disturb=score_rewards, timeout_s=3.5)
    assert [response.environment.failure for response in chain.from_iterable(found)] == [None] * 10


def test_a_program_leaves_no_process_behind(answer, tmp_path):
    script = tmp_path / "program.sh"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >> {tmp_path}/left\nexec {sys.executable} {AGENTS}\n")
    script.chmod(0o755)
    answer(command=[str(script)], count=1)
    left = [int(line) for line in (tmp_path / "left").read_text().split()]
    assert len(left) == 5
    for process in left:
        state = Path(f"/proc/{process}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("exceptions", [None, ".corp,10.0.0.5", "*"])
def test_agents_reach_the_endpoint_past_a_proxy(answer, monkeypatch, exceptions):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    if exceptions:
        monkeypatch.setenv("NO_PROXY", exceptions)
    found, _ = answer(agent="through_the_environment", count=1, options={"exceptions": exceptions})
    assert {response.environment.reward for response in chain.from_iterable(found)} == {1.0}


def test_agents_go_on_while_training_is_waited_for(answer):
    def train(turns, pool, executor):
        pool.withdraw_weights()
        turns.attend(Training(lambda: asked(executor) == 20))

    found, _ = answer(disturb=train)
    assert {response.environment.reward for group in found for response in group} == {1.0}


def test_agents_end_before_the_next_weights_or_each_token_knows_its_version(answer):
    def finish_in_flight(turns, pool, executor):
        turns.finish_in_flight()
        pool.load_weights(weights(2))

    def update(turns, pool, executor):
        turns.attend(Training(lambda: asked(executor) > 10))  # a second turn
        pool.load_weights(weights(2))

    versions = []
    for disturb in (finish_in_flight, update):
        found, _ = answer(disturb=disturb, processes=8)
        responses = [response for group in found for response in group]
        assert all(len(one.versions) == sum(one.response_mask) for one in responses)
        versions.append({(one.versions[0], one.versions[-1]) for one in responses})
    assert versions[0] == {(1, 1)}
    assert (2, 2) in versions[1]


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({}, "none of them"),
        ({"path": "a:b", "agent": "c:d"}, "path and agent"),
        ({"command": ["x"], "options": {"y": 1}}, "into command, after the program"),
        ({"path": "a:b", "attempts": 2}, "agents only"),
    ],
)
def test_an_environment_is_one_of_three(section, why):
    with pytest.raises(ValueError, match=why):
        EnvironmentSection(**section)


def test_an_agent_that_cannot_be_called_is_refused_before_the_run():
    check_environment(EnvironmentSection(agent=f"{AGENTS}:asynchronous"))
    with pytest.raises(ConfigError, match="fault"):
        check_environment(EnvironmentSection(agent=f"{AGENTS}:choosy"))
    with pytest.raises(ConfigError, match=r"environment\.command \(no-such-program\)"):
        check_environment(EnvironmentSection(command=["no-such-program"]))


def test_an_endpoint_without_a_key_is_refused_with_the_command_that_makes_one(monkeypatch):
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"source": "s:s"},
            "rewards": [{"function": "contains"}],
            "rollout": {"endpoint": {}},
            "trainer": {"total_steps": 1},
        }
    )
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"export {KEY_VARIABLE}="):
        endpoint_key(config)
    monkeypatch.setenv(KEY_VARIABLE, "a-key-that-is-long-enough")
    assert endpoint_key(config) == "a-key-that-is-long-enough"


def test_the_representation_of_a_task_shows_no_key():
    from anytron.tasks import AgentTask

    assert "secret" not in repr(AgentTask("p", "t", {}, 0, 1, "http://127.0.0.1/v1", "secret", "policy"))
