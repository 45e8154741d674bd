"""A request that is given up is never returned, and the others get the responses that their seeds give."""

from __future__ import annotations

import random

import pytest

from tests.core.run.rollout.replicas import PROMPTS, SAMPLING, Executor, pool_of, response_to, weights


@pytest.mark.parametrize("seed", range(10))
def test_what_is_given_up_is_never_returned(seed):
    order, executor = random.Random(seed), Executor(seed)
    pool = pool_of(executor, 2, max_batch_size=4)
    pool.load_weights(weights(1))
    numbers = pool.ask([(prompt, SAMPLING, place) for place, prompt in enumerate(PROMPTS * 3)])
    found, given_up = {}, set()
    while len(found) + len(given_up) < len(numbers):
        found |= dict(pool.poll(1.0))
        if waiting := [number for number in numbers if number not in found and number not in given_up]:
            some = set(order.sample(waiting, min(2, len(waiting))))
            pool.cancel(some)
            given_up |= some
    pool.finish_in_flight()

    assert found.keys().isdisjoint(given_up)
    assert len(given_up) > 5
    held = [group.engine.held for group in executor.groups]
    assert held == [[], []]
    requests = {request.id: request for group in executor.groups for request in group.engine.seen}
    assert all(response == response_to(requests[number], 1) for number, response in found.items())
    assert any(getattr(group.engine, "aborted", []) for group in executor.groups)
