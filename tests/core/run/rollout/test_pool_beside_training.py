"""Replicas work while training ranks are waited for, and their responses may go on over an update of the weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from anytron.base.errors import ProcessLost, WorkerError
from anytron.run.rollout.turns import AttendedGroup, SingleTurns
from tests.core.run.rollout.replicas import (
    PROMPTS,
    SAMPLING,
    Engine,
    Executor,
    Losses,
    pool_of,
    response_to,
    tokens,
    weights,
)


class Training:
    """A call to training ranks, who are done when so much was waited for."""

    def __init__(self, executor, waits):
        self.before, self.waits = 0, waits
        self.executor, self.wait = executor, executor.wait
        executor.wait = self.watch

    def watch(self, calls, timeout_s):
        self.before += 1
        return self.wait(calls, timeout_s)

    @property
    def done(self):
        return self.before >= self.waits

    def result(self):
        self.executor.wait = self.wait
        return ["trained"]


def attended(executor, pool, waits):
    """Training ranks that the pool is attended beside."""
    return AttendedGroup(SimpleNamespace(submit=lambda method: Training(executor, waits)), SingleTurns(pool, SAMPLING))


def test_responses_are_made_while_training_is_waited_for(expected):
    executor = Executor()
    pool = pool_of(executor, 2, max_batch_size=4)
    pool.load_weights(weights(1))
    generation = pool.begin(PROMPTS, SAMPLING, 4, seed=1)
    pool.withdraw_weights()
    assert all(group.under_way is not None for group in executor.groups), "also while the driver does something else"

    assert attended(executor, pool, 200).call("update") == ["trained"]

    executor.wait = None
    assert pool.finish(generation) == expected[0], "all were there"


def test_a_replica_that_is_in_a_call_is_asked_after_it():
    executor = Executor()
    pool = pool_of(executor, 2)
    attended(executor, pool, 0).call("describe")
    assert all(group.under_way is not None for group in executor.groups)
    assert pool.describe() == [{"version": None}] * 2


def test_two_steps_under_way_are_told_apart(expected):
    for seed in range(5):
        pool = pool_of(Executor(seed), 2, max_batch_size=3)
        pool.load_weights(weights(1))
        first = pool.begin(PROMPTS, SAMPLING, 4, seed=1)
        second = pool.begin(PROMPTS, SAMPLING, 4, seed=2)
        found = [pool.finish(first), pool.finish(second)]
        assert found[0] == expected[0]
        assert tokens(found[1]) == tokens(expected[1])


class Mortal(Engine):
    """Dies in the next poll as soon as it is doomed."""

    doomed = False

    def poll(self, seconds):
        if self.doomed:
            raise ProcessLost("Rollout rank 0 was killed.")
        return super().poll(seconds)


def test_what_a_replica_owed_when_it_was_lost_beside_training_others_make_with_the_same_weights(expected):
    losses = Losses()
    executor = Executor(make=lambda number, order: (Mortal if number == 0 else Engine)(order))
    pool = pool_of(executor, 2, losses, max_batch_size=4)
    pool.load_weights(weights(1))
    generation = pool.begin(PROMPTS, SAMPLING, 4, seed=1)
    pool.withdraw_weights()
    executor.groups[0].engine.doomed = True
    attended(executor, pool, 3).call("update")
    pool.finish_in_flight()
    executor.wait = None

    assert pool.finish(generation) == expected[0]
    assert len(losses.errors) == 1
    successor = executor.groups[2].engine
    assert (successor.version, successor.seen) == (None, []), "it has missed those weights"


def test_when_all_are_lost_beside_training_their_successors_go_on_with_new_weights(expected):
    losses = Losses()
    executor = Executor(make=lambda number, order: (Mortal if number < 2 else Engine)(order))
    pool = pool_of(executor, 2, losses, max_batch_size=4)
    pool.load_weights(weights(1))
    generation = pool.begin(PROMPTS, SAMPLING, 4, seed=1)
    pool.withdraw_weights()
    attended(executor, pool, 8).call("update")
    for group in executor.groups:
        group.engine.doomed = True
    attended(executor, pool, 100).call("update")
    pool.finish_in_flight()
    pool.load_weights(weights(2))
    found = pool.finish(generation)

    assert len(losses.errors) == 2
    assert [[one.tokens for one in group] for group in found] == [
        [one.tokens for one in group] for group in expected[0]
    ]
    assert {one.versions[0] for group in found for one in group if one.tokens} == {1, 2}


def test_an_error_beside_training_leaves_the_ranks_their_call_and_is_raised_after_it():
    class Raises(Engine):
        def poll(self, seconds):
            raise WorkerError("Rollout rank 0 failed in poll().")

    executor = Executor(make=lambda number, order: Raises(order))
    pool = pool_of(executor, 1, Losses())
    pool.load_weights(weights(1))
    pool.begin(PROMPTS, SAMPLING, 4, seed=1)
    trainer = attended(executor, pool, 50)
    assert trainer.call("update") == trainer.call("update") == ["trained"]
    with pytest.raises(WorkerError, match=r"failed in poll\(\)"):
        pool.finish_in_flight()


class TokenByToken(Engine):
    """Gives each response that it holds one token more at each poll, by the weights that it has then."""

    def submit(self, requests):
        super().submit(requests)
        self.made = getattr(self, "made", {}) | {request.id: () for request in requests}

    def poll(self, seconds):
        finished = []
        for request in list(self.held):
            whole = response_to(request, self.version)
            if len(self.made[request.id]) == len(whole.tokens):
                self.held.remove(request)
                finished.append((request.id, replace(whole, versions=self.told(self.made[request.id]))))
            self.made[request.id] += (self.version,)
        return finished

    def told(self, versions):
        return versions


def over_an_update(engine, losses):
    executor = Executor(make=lambda number, order: (engine if number == 0 else TokenByToken)(order))
    pool = pool_of(executor, 2, losses)
    pool.load_weights(weights(0))
    pool.load_weights(weights(1))
    generation = pool.begin(PROMPTS, SAMPLING, 4, seed=1)
    pool.withdraw_weights()
    attended(executor, pool, 5).call("update")
    pool.load_weights(weights(2))
    return pool.finish(generation)


def test_responses_under_way_go_on_over_an_update(expected):
    found = over_an_update(TokenByToken, None)
    assert [[one.tokens for one in group] for group in found] == [
        [one.tokens for one in group] for group in expected[0]
    ]
    kinds = {tuple(sorted(set(one.versions))) for group in found for one in group if one.tokens}
    assert kinds == {(1,), (1, 2)}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (lambda versions: versions[::-1], "its weight versions are not in ascending order"),
        (lambda versions: tuple(0 for _ in versions), "it comes from weights of version 0, but version"),
    ],
    ids=["order", "before-it-was-asked"],
)
def test_versions_that_cannot_be_are_noticed_also_over_an_update(told, message):
    class Liar(TokenByToken):
        def told(self, versions):
            return told(versions)

    losses = Losses()
    over_an_update(Liar, losses)
    (error,) = losses.errors
    assert message in error.why
