"""Conversations with the calculator of examples/: real environment processes, the real pool, and an engine that plays.

The engine's model knows how to use a calculator. What it writes follows from the tokens that it is given.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from anytron.base.errors import DataError
from anytron.run.rollout.turns import SingleTurns, turns_of
from anytron.task.data.prompts import TokenizedPrompt
from anytron.workers.engines.rollout_engine import SamplingParams
from tests.core.run.rollout.pupil import EXAMPLE, QUESTIONS, Training, asked, product, prompt
from tests.core.run.rollout.replicas import Executor, pool_of, weights


def test_what_the_model_saw_is_what_is_trained(converse, tokenizer):
    found, requests = converse()
    assert [len(group) for group in found] == [2] * 5
    for question, group in zip(QUESTIONS, found, strict=True):
        answer = product(question)
        for response in group:
            assert tokenizer.decode(response.tokens) == f"{question}*{answer};{answer}<eos>"
            own = [True] * 5 + [False] * (len(answer) + 1) + [True] * (len(answer) + 1)
            assert list(response.response_mask) == own
            assert [value < 0 for value in response.log_probs] == own
            assert response.finished
            assert response.environment.turns == (f"{question}*", answer)
            assert response.environment.reward == 1.0
            assert response.environment.metrics == {"tool_calls": 1.0, "right": 1.0}
            # A token's experts are those of the turn that has told of it first: the second begins with the last "*".
            read = prompt(tokenizer, question).tokens + response.tokens[:-1]
            given = [5] * 9 + [10 + len(answer) + 1] * (len(read) - 9)
            assert response.routing.squeeze(1).tolist() == [list(row) for row in zip(read, given, strict=True)]
    # Each turn's request holds the tokens that are trained, up to where the turn begins; and each has its own seed.
    whole = {prompt(tokenizer, q).tokens + t.tokens for q, group in zip(QUESTIONS, found, strict=True) for t in group}
    for request in requests:
        asked = request.prompt.tokens
        assert any(tokens[: len(asked)] == asked for tokens in whole)
    assert len({request.seed for request in requests}) == len(requests) == 20


def test_the_order_in_which_things_are_done_changes_nothing(converse):
    found = [converse(seed=seed, replicas=replicas, processes=p)[0] for seed, replicas, p in ((0, 1, 1), (1, 3, 2))]
    for one, other in zip(*(chain.from_iterable(groups) for groups in found), strict=True):
        assert torch.equal(one.routing, other.routing)
        assert replace(one, routing=None) == replace(other, routing=None)


def test_an_environment_is_told_how_many_turns_there_may_be(converse, tmp_path):
    (tmp_path / "e.py").write_text(
        EXAMPLE.read_text() + "\nclass Told(Calculator):\n    def reset(self, task):\n"
        "        assert task.max_turns != 3, 'three turns'\n        super().reset(task)\n"
    )
    assert converse(path=f"{tmp_path}/e.py:Told", max_turns=4)[0][0][0].finished
    with pytest.raises(DataError, match="three turns"):
        converse(path=f"{tmp_path}/e.py:Told", max_turns=3)


def test_after_the_last_turn_the_observation_is_not_read(converse, tokenizer):
    found, _ = converse(max_turns=1)
    for question, group in zip(QUESTIONS, found, strict=True):
        for response in group:
            assert tokenizer.decode(response.tokens) == f"{question}*"
            assert not response.finished
            assert response.environment.reward == 0.5


def test_an_observation_that_is_too_long_ends_the_response_before_it(converse, tokenizer):
    found, _ = converse(max_observation_tokens=4)  # "100;" has four, all others five
    texts = {tokenizer.decode(response.tokens): response.finished for group in found for response in group}
    assert texts.pop("1010*100;100<eos>")
    assert texts == {"1234*408;408<eos>": True} | dict.fromkeys(("5678*", "9012*", "9999*"), False)


def test_a_conversation_ends_with_the_models_context(converse, tokenizer):
    found, requests = converse(context_length=16)  # 5 of the prompt, 11 of the response
    texts = {tokenizer.decode(response.tokens) for group in found for response in group}
    assert texts == {"1010*100;10", "1234*408;40", "5678*4368;4", "9012*1080;1", "9999*9801;9"}
    assert {len(request.prompt.tokens) + request.sampling.max_new_tokens for request in requests} == {13, 16}
    found, _ = converse(context_length=15)  # five tokens of observation leave none for a turn
    texts = {tokenizer.decode(response.tokens): response.finished for group in found for response in group}
    answered = {"1010*100;1": True, "1234*408;4": True}  # the environment takes what is cut off for an answer
    assert texts == answered | dict.fromkeys(("5678*", "9012*", "9999*"), False)


def test_an_environment_that_fails_costs_its_sample(converse, tmp_path):
    (tmp_path / "e.py").write_text(
        EXAMPLE.read_text() + "\nclass Fragile(Calculator):\n    def step(self, turn):\n"
        "        assert turn.text != '9012*', 'not this one'\n        return super().step(turn)\n"
    )
    found, _ = converse(path=f"{tmp_path}/e.py:Fragile")
    for question, group in zip(QUESTIONS, found, strict=True):
        for response in group:
            failure = response.environment.failure
            assert (failure is not None) == (question == "9012")
            assert failure is None or "not this one" in failure.why


def test_tokens_that_the_model_does_not_know_cost_the_sample(converse, tmp_path):
    (tmp_path / "e.py").write_text(
        EXAMPLE.read_text() + "\nclass Odd(Calculator):\n    def step(self, turn):\n"
        "        if '90' in turn.text:\n            return Observation(tokens=[3, 17])\n"
        "        return super().step(turn)\n"
    )
    found, _ = converse(path=f"{tmp_path}/e.py:Odd")
    failures = [response.environment.failure for response in found[2]]
    assert all("ids are from 3 to 17, but the vocabulary has 17" in failure.why for failure in failures)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_fails_for_all_ends_the_run(converse, tmp_path, method):
    (tmp_path / "e.py").write_text(
        "class Broken:\n    def reset(self, task): ...\n    def step(self, turn): ...\n"
        f"def fail(*arguments):\n    raise LookupError('no opinion')\nBroken.{method} = fail\n"
    )
    with pytest.raises(DataError, match=r"(?s)s method \w+ raised.*prompt .*for every sample so far.*no opinion"):
        converse(path=f"{tmp_path}/e.py:Broken")


def test_conversations_go_on_while_training_is_waited_for(converse):
    def train(turns, pool, executor):
        pool.withdraw_weights()
        turns.attend(Training(lambda: asked(executor) == 20))

    found, _ = converse(disturb=train)
    assert {response.environment.reward for group in found for response in group} == {1.0}


def test_conversations_end_before_the_next_weights_or_go_on_with_them(converse):
    def finish_in_flight(turns, pool, executor):
        turns.finish_in_flight()
        pool.load_weights(weights(2))

    def update(turns, pool, executor):
        turns.attend(Training(lambda: asked(executor) > 10))  # a second turn
        pool.load_weights(weights(2))

    versions = []
    for disturb in (finish_in_flight, update):
        found, _ = converse(disturb=disturb)
        responses = [response for group in found for response in group]
        assert all(len(one.versions) == sum(one.response_mask) for one in responses)
        versions.append({(one.versions[0], one.versions[-1]) for one in responses})
    assert versions[0] == {(1, 1)}
    assert (1, 2) in versions[1]


def test_what_goes_wrong_beside_training_is_raised_when_responses_are_needed(converse, tmp_path):
    (tmp_path / "e.py").write_text(
        "class Broken:\n    def reset(self, task):\n        raise LookupError('no opinion')\n    step = reset\n"
    )

    def train(turns, pool, executor):
        turns.attend(Training(lambda: False))

    with pytest.raises(DataError, match=r"(?s)s method \w+ raised.*for every sample so far.*no opinion"):
        converse(path=f"{tmp_path}/e.py:Broken", count=4, disturb=train)


def test_without_an_environment_a_response_is_one_turn():
    executor = Executor()
    pool = pool_of(executor, 1)
    pool.load_weights(weights(1))
    prompts = [TokenizedPrompt("p", "31", (3, 1), {})]
    turns = turns_of(
        SimpleNamespace(environment=None), SimpleNamespace(sampling=SamplingParams(max_new_tokens=5)), pool, None
    )
    assert isinstance(turns, SingleTurns)
    ((one, two),) = turns.finish(turns.begin(prompts, 2, seed=3))
    assert one.response_mask is None
    assert one.environment is None
    assert one.tokens != two.tokens
