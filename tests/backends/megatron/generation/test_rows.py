"""Rows of a batch: prompts of different lengths beside each other, and where responses end."""

from __future__ import annotations

import torch

from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, SamplingParams
from anytron_megatron.generation.rows import Rows

END = 11
PROMPTS = ((1, 2, 3, 4), (5, 6), (7, 8, 9))


class StopAt77:
    """Stop strings over tokens whose text is their digits."""

    tail = 3

    def shown(self, tails):
        assert all(len(tail) <= self.tail for tail in tails)
        return ["77" in "".join(map(str, tail)) for tail in tails]


def rows_of(prompts=PROMPTS, stop=None, **sampling) -> Rows:
    params = SamplingParams(**({"max_new_tokens": 3, "end_token_ids": (END,)} | sampling))
    return Rows([GenerationRequest(n, PromptInputs(prompt), params, n) for n, prompt in enumerate(prompts)], stop)


def feed(rows, *drawn):
    """Feed column after column, draw the given tokens behind each; return what was fed."""
    fed = []
    for tokens in drawn:
        fed.append(rows.next_tokens().tolist())
        rows.column += 1
        rows.take(tokens, [-token / 8 for token in tokens])
    return fed


def test_each_row_is_fed_from_its_prompt_and_then_what_was_drawn():
    rows = rows_of(max_new_tokens=2)
    beginnings = rows.beginnings()
    rows.column = beginnings.shape[1]

    fed = feed(rows, (91, 21, 92), (93, 22, 31), (41, 94, 32), (42, 95, 96))

    assert beginnings.tolist() == [[1], [5], [7]]
    assert fed == [[2, 6, 8], [3, 21, 9], [4, 22, 31], [41, 22, 32]]
    assert rows.columns == 5 == rows.column
    assert rows.ended
    responses = rows.responses(version=7)
    assert [response.tokens for response in responses] == [(41, 42), (21, 22), (31, 32)]
    expected = [(-41 / 8, -42 / 8), (-21 / 8, -22 / 8), (-31 / 8, -32 / 8)]
    assert [response.log_probs for response in responses] == expected
    assert {(response.stop_reason, response.versions) for response in responses} == {("length", (7, 7))}


def test_places_count_from_the_first_token_of_each_response():
    rows = rows_of()
    rows.column = 3
    assert torch.equal(rows.places(), torch.tensor([-1, 1, 0]))


def test_a_prompt_of_one_token_leaves_nothing_to_be_fed_at_once():
    rows = rows_of(((1, 2), (3,)))
    assert rows.beginnings().shape == (2, 0)
    assert feed(rows, (90, 5)) == [[1, 3]]


def test_an_end_token_ends_a_response_and_belongs_to_it():
    rows = rows_of(((1,), (2,)))
    feed(rows, (END, 5), (6, END), (7, 8))
    assert [(one.tokens, one.stop_reason) for one in rows.responses(0)] == [((END,), "stop"), ((5, END), "stop")]


def test_the_last_token_that_is_allowed_may_be_an_end():
    rows = rows_of(((1,), (2,)), max_new_tokens=1)
    feed(rows, (END, 5))
    assert [one.stop_reason for one in rows.responses(0)] == ["stop", "length"]


def test_nothing_ends_before_the_shortest_length():
    rows = rows_of(((1,), (2,)), stop=StopAt77(), min_new_tokens=3, max_new_tokens=4)
    feed(rows, (7, END), (7, 7), (7, 7), (8, 8))
    assert [(one.tokens, one.stop_reason) for one in rows.responses(0)] == [
        ((7, 7, 7), "stop"),
        ((END, 7, 7), "stop"),
    ]


def test_a_stop_string_ends_a_response_and_is_looked_for_in_the_response_only():
    rows = rows_of(((7, 7), (1, 7)), stop=StopAt77())
    feed(rows, (50, 50), (1, 7), (2, 7), (7, 3))
    assert [(one.tokens, one.stop_reason) for one in rows.responses(0)] == [((1, 2, 7), "length"), ((7, 7), "stop")]
