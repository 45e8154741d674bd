"""The calculator's task through OpenAI's client is the task of the calculator's environment, token by token."""

from __future__ import annotations

import pytest

from anytron.config.imports import _from_file
from anytron.tasks import Task, Turn
from anytron.workers.engines.rollout_engine import SamplingParams
from tests.agents.driving import EXAMPLES, Script, agent, check_one_conversation, solved
from tests.core.serving.served import serving

CALCULATOR = _from_file(str(EXAMPLES / "calculator.py"), "environment.path")
DATA = {"answer": "1776"}


def split_by_character(order, text):
    return CALCULATOR.tokenizer()(text)["input_ids"]


def as_environment(texts):
    """The prompt's tokens, each observation's tokens, reward and metrics in the environment."""
    ids = CALCULATOR.tokenizer()
    one, reward, metrics = CALCULATOR.Calculator(), 0.0, {}
    one.reset(Task("product-0", "3748>", DATA, 0, 2))
    conversation = ids("3748>")["input_ids"]
    for text in texts:
        tokens = split_by_character(None, text) + ([] if text.endswith("*") else [14])
        found = one.step(Turn(text, tuple(tokens), True))
        conversation += tokens
        reward += found.reward
        metrics = {name: metrics.get(name, 0) + found.metrics.get(name, 0) for name in {**metrics, **found.metrics}}
        if found.done:
            break
        conversation += ids(found.text)["input_ids"]
    return conversation, reward, metrics


@pytest.mark.parametrize(
    "texts",
    [
        ["3748*", "1776"], ["3748*", "1777"], ["37*", "1776"], ["3748*", "17*"], ["1776"], ["12"], ["*", "!"],
        ["9948*", "4752"], ["3748*", ""], [""],
    ],
)  # fmt: skip
def test_tokens_rewards_and_metrics_are_those_of_the_environment(texts):
    tokenizer = CALCULATOR.tokenizer()
    sampling = SamplingParams(max_new_tokens=5, end_token_ids=(14,), pad_token_id=15, stop=("*",))
    pool = Script(texts, split_by_character, end=14)
    with serving(pool, tokenizer, sampling, context=64) as server:
        result, session = solved(server, agent("calculator_agent.py"), "3748>", DATA, max_turns=2)
        check_one_conversation(server, session, len(texts))
    (branch,) = session.branches()
    assert (list(branch.tokens), result.reward, dict(result.metrics)) == as_environment(texts)
