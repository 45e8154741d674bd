"""What an environment says, as tokens."""

from __future__ import annotations

import pytest

from anytron.config.imports import resolve
from anytron.environments import Observation
from anytron.rollout.observations import observation_tokens
from tests.house import ROOT


@pytest.mark.parametrize(("given", "tokens"), [({}, (1, 8)), ({"think": True}, (1, 7))])
def test_the_chat_template_of_an_observation_gets_the_same_arguments_as_that_of_a_prompt(given, tokens):
    tokenizer = resolve(f"{ROOT}/examples/sort_digits.py:tokenizer", key="model.tokenizer")()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{{ '7' if think is defined and think else '8' }}"
    )
    said = Observation(messages=[{"role": "user", "content": "1"}])
    assert observation_tokens(said, None, tokenizer, 16, given) == tokens
