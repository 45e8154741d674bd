"""Conversations whose tokens, log-probs or mask are not those that were sampled and shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anytron.proof.verification.conversations import mistake_in
from anytron.workers.engines.rollout_engine import Response

PROMPT, SHOWN = (1, 2), (9, 5, 6)
FIRST, SECOND, OTHER = (
    Response(tokens, log_probs, "stop", (0,) * len(tokens))
    for tokens, log_probs in (((3, 9), (-1.0, -0.5)), ((4, 4), (-2.0, -0.25)), ((3,), (-1.5,)))
)
TURNS = [(PROMPT, OTHER), (PROMPT, FIRST), ((1, 2, 3, 9, 5, 6), SECOND)]
RIGHT = Response(
    (3, 9, 5, 6, 4, 4),
    (-1.0, -0.5, 0.0, 0.0, -2.0, -0.25),
    "length",
    (0,) * 4,
    response_mask=(True, True, False, False, True, True),
)


def test_a_conversation_of_what_was_sampled_and_shown_is_right():
    assert mistake_in(PROMPT, RIGHT, TURNS, SHOWN) == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": (3, 9, 5, 6, 4, 7)}, "turn 2 is not what the rollout engine sampled"),
        ({"log_probs": (-1.0, -0.5, 0.0, 0.0, -2.0, -2.0)}, "turn 2 is not what the rollout engine sampled"),
        ({"tokens": (3, 9, 6, 5, 4, 4)}, "[6, 5] follow turn 1, where the whole conversation has [5, 6]"),
        ({"response_mask": (True, True, True, False, True, True)}, "the mask takes tokens of the environment"),
    ],
)
def test_another_token_log_prob_or_mark_is_named(change, says):
    assert says in mistake_in(PROMPT, replace(RIGHT, **change), TURNS, SHOWN)


def test_the_end_of_a_turn_is_not_written_twice():
    """The first turn ends with the template's own end token, the other does not."""
    turns = [(PROMPT, OTHER), ((1, 2, 3, 9, 5, 6), SECOND)]
    tokens = (3, 9, 5, 6, 4, 4)
    mask = (True, False, False, False, True, True)
    response = replace(RIGHT, tokens=tokens, log_probs=(-1.5, 0.0, 0.0, 0.0, -2.0, -0.25), response_mask=mask)
    assert mistake_in(PROMPT, response, turns, SHOWN) == ""
