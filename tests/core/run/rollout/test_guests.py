"""Guests of the pool: their requests are answered while the driver waits, and change none of its responses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.run.rollout.replicas import PROMPTS, SAMPLING, Engine, Executor, pool_of, weights


class Guest:
    """Asks one question at each visit."""

    def __init__(self, sampling=SAMPLING):
        self.visits, self.answers, self.sampling = 0, {}, sampling

    def visit(self, pool):
        self.visits += 1
        pool.ask([(PROMPTS[self.visits % 10], self.sampling, self.visits)], self.answers.__setitem__)


@pytest.mark.parametrize("seed", range(5))
def test_guests_are_answered_while_the_driver_waits_and_never_while_replicas_finish_or_sleep(expected, seed):
    executor = Executor(seed)
    pool = pool_of(executor, 3, sleep=True)
    pool.guests = guest = Guest()
    pool.load_weights(weights(1))
    assert pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=1)) == expected[0]  # the driver's own responses
    assert guest.answers
    before = guest.visits
    pool.sleep()
    assert guest.visits == before
    assert not any(group.engine.held for group in executor.groups)
    assert len(guest.answers) == before
    pool.load_weights(weights(2))
    while len(guest.answers) == before:
        assert pool.poll(0.0) == []
    assert {version for response in list(guest.answers.values())[before:] for version in response.versions} <= {2}


def test_an_engine_gets_requests_of_one_temperature_at_a_time():
    class Particular(Engine):
        def submit(self, requests):
            super().submit(requests)
            assert len({request.sampling.temperature for request in self.held}) == 1

    executor = Executor(4, lambda number, order: Particular(order))
    pool = pool_of(executor, 2)
    pool.guests = guest = Guest(replace(SAMPLING, temperature=0.5))  # asks again and again
    pool.load_weights(weights(1))
    while len(guest.answers) < 5:
        pool.poll(0.0)
    pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=1))
