"""Several engines share the work, and whatever happens to one, each request gets the response that its seed gives."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from anytron.base.errors import ProcessLost, WorkerError
from anytron.config.generation import RolloutSection
from anytron.run.rollout.pool import RolloutPool
from anytron.run.rollout.replica import WeightAnswers
from anytron.workers.engines.rollout_engine import Response, RoutingShape
from tests.core.run.rollout.replicas import (
    PROMPTS,
    SAMPLING,
    Engine,
    Executor,
    Group,
    Losses,
    pool_of,
    two_steps,
    weights,
)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 4, 512])
def test_neither_the_replicas_nor_their_order_change_a_response(expected, replicas, batch):
    for seed in range(5):
        executor = Executor(seed)
        assert two_steps(pool_of(executor, replicas, max_batch_size=batch)) == expected
        assert executor.started == [(replica, replicas) for replica in range(replicas)]
        assert max(group.engine.most for group in executor.groups) <= batch


def test_each_replica_begins_with_an_equal_part_and_the_longest_prompts_come_first():
    executor = Executor()
    pool = pool_of(executor, 2)
    pool.load_weights(weights(1))
    pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))

    lengths = [[len(request.prompt.tokens) for request in group.engine.seen] for group in executor.groups]
    assert [len(seen) for seen in lengths] == [20, 20]
    assert lengths[0] + lengths[1] == sorted(lengths[0] + lengths[1], reverse=True)


def test_a_replica_that_is_done_takes_what_is_left():
    class Slow(Engine):
        def poll(self, seconds):
            self.polls = getattr(self, "polls", 0) + 1
            return super().poll(seconds) if self.polls % 20 == 0 else []

    executor = Executor(make=lambda number, order: (Slow if number == 0 else Engine)(order))
    pool = pool_of(executor, 2, max_batch_size=3)
    pool.load_weights(weights(1))
    pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))

    slow, fast = (len(group.engine.seen) for group in executor.groups)
    assert slow + fast == 40
    assert fast > 3 * slow


@pytest.mark.parametrize("method", ["load_weights", "submit", "poll", "describe"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_replica_that_is_lost_is_replaced_and_others_make_its_responses(expected, method, call):
    class Mortal(Engine):
        calls = 0

        def __getattribute__(self, name):
            if name == method:
                self.calls += 1
                if self.calls == call:
                    raise ProcessLost("Rollout rank 0 was killed.")
            return super().__getattribute__(name)

    losses = Losses()
    executor = Executor(make=lambda number, order: (Mortal if number == 0 else Engine)(order))
    pool = pool_of(executor, 2, losses, max_batch_size=6)
    pool.describe()

    assert two_steps(pool) == expected
    assert pool.describe() == [{"version": 2}, {"version": 2}]
    assert len(losses.errors) == 1
    assert executor.groups[0].ended
    assert executor.started == [(0, 2), (1, 2), (0, 2)]


END = 5000
"""No honest engine of these tests draws it."""


def extra(finished, engine):
    return [*finished, (12345, Response((), (), "stop", ()))]


def changed(**values):
    def change(finished, engine):
        response = Response((1, 2), (-0.1, -0.2), "stop", (engine.version,) * 2)
        return [(number, Response(**{**vars(response), **values})) for number, _ in finished]

    return change


WRONG = {
    "another request's": (extra, "response 12345: it was not requested"),
    "twice": (lambda finished, engine: [*finished, *finished[:1]], "it was not requested"),
    "log-probs": (changed(log_probs=(-0.1,)), "2 tokens have 1 log-probs and 2 versions"),
    "versions": (changed(versions=()), "2 tokens have 2 log-probs and 0 versions"),
    "length": (changed(tokens=(1,) * 6, log_probs=(0.0,) * 6, versions=(1,) * 6), "6 tokens, but only 5 were allowed"),
    "aborted": (changed(stop_reason="abort"), "it was aborted"),
    "goes on": (changed(tokens=(END, 2)), "it goes on after an end token, its 1. of 2 tokens"),
    "mixed": (changed(versions=(0, 1)), "it comes from weights of version 0, but version 1 is current"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_replica_that_answers_wrongly_is_replaced(change, message):
    class Liar(Engine):
        def poll(self, seconds):
            finished = super().poll(seconds)
            return change(finished, self) if finished else finished

    losses = Losses()
    executor = Executor(make=lambda number, order: (Liar if number == 1 else Engine)(order))
    pool, honest = pool_of(executor, 2, losses), pool_of(Executor(), 1)
    for each in (pool, honest):
        each.load_weights(weights(1))

    sampling = replace(SAMPLING, end_token_ids=(END,))
    assert pool.finish(pool.begin(PROMPTS, sampling, 4, seed=0)) == honest.finish(
        honest.begin(PROMPTS, sampling, 4, seed=0)
    )
    (error,) = losses.errors
    assert error.what == "Rollout replica 1 returned an invalid result."
    assert message in error.why
    assert executor.groups[1].ended


def test_a_replica_without_the_routing_that_is_asked_for_is_replaced():
    class Router(Engine):
        complete = True

        def poll(self, seconds):
            lengths = {request.id: len(request.prompt.tokens) for request in self.held}
            return [
                (number, replace(response, routing=self.routing(lengths[number] + len(response.tokens) - 1)))
                for number, response in super().poll(seconds)
            ]

        def routing(self, rows):
            return torch.tensor([3, 0], dtype=torch.uint8).expand(rows if self.complete else rows + 1, 2, 2)

    class Liar(Router):
        complete = False

    losses = Losses()
    pool = pool_of(Executor(make=lambda number, order: (Liar if number == 1 else Router)(order)), 2, losses)
    pool.routing = RoutingShape(layers=2, chosen=2, experts=4)
    pool.load_weights(weights(1))
    found = pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))
    assert all(response.routing.shape[1:] == (2, 2) for group in found for response in group)
    (error,) = losses.errors
    assert "its routing is torch.uint8" in error.why


def test_a_replica_that_keeps_its_old_weights_is_replaced(expected):
    class Stale(Engine):
        def load_weights(self, manifest):
            return super().load_weights(manifest if self.version is None else SimpleNamespace(version=self.version))

    losses = Losses()
    executor = Executor(make=lambda number, order: (Stale if number == 0 else Engine)(order))

    assert two_steps(pool_of(executor, 2, losses)) == expected
    (error,) = losses.errors
    assert error.why == "it has weights of version 1, but version 2 was sent"


def test_replicas_sleep_until_they_get_weights_also_if_one_is_lost_meanwhile(expected):
    class Sleepless(Engine):
        def sleep(self):
            raise ProcessLost("Rollout rank 0 was killed.")

    losses = Losses()
    executor = Executor(make=lambda number, order: (Sleepless if number == 0 else Engine)(order))
    pool, found = pool_of(executor, 2, losses), []
    for step in (1, 2):
        pool.load_weights(weights(step))
        found.append(pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=step)))
        metrics = pool.sleep()
        assert metrics["memory/asleep_bytes"] == 10
        assert metrics["memory/rollout_peak_bytes"] in {7, 8}
        assert [replica.group.engine.version for replica in pool._replicas] == [None, None]
    assert found == expected
    assert len(losses.errors) == 1


class TrainingRanks(Group):
    """Training ranks that generate: four answers to each call, two of them of ranks that report."""

    def submit(self, method, *arguments):
        call = super().submit(method, *arguments)
        whole = call.result

        def result():
            (answer,) = whole()
            return [answer[::2], [], [], answer[1::2]] if method == "poll" else [answer] * 4

        call.result = result
        return call


def test_training_ranks_may_be_the_only_replica_and_their_loss_is_the_run_s(expected):
    class Nothing(Executor):
        def start(self, spec):
            raise AssertionError("there is no rollout process")

    executor = Nothing()
    ranks = TrainingRanks(Engine(executor.order))

    def in_place(version):
        ranks.engine.version = version
        return lambda groups: WeightAnswers(version, [version] * len(groups))

    pool = RolloutPool(executor, RolloutSection(engine="megatron"), lost=None, within=ranks)
    for step, groups in enumerate(expected, start=1):
        pool.load_weights(in_place(step))
        assert pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=step)) == groups
    assert pool.describe() == [{"version": 2}]

    ranks.engine.poll = lambda seconds: [(12345, Response((), (), "stop", ()))]
    with pytest.raises(ProcessLost, match="returned an invalid result"):
        pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=3))
    assert ranks.ended


def test_when_none_lives_the_run_ends_with_the_last_ones_words():
    class Dead(Engine):
        def poll(self, seconds):
            raise ProcessLost("Rollout rank 0 was killed.", why="the last lines it wrote")

    pool = pool_of(Executor(make=lambda number, order: Dead(order)), 2, Losses(limit=3))
    pool.load_weights(weights(1))
    with pytest.raises(WorkerError, match="the last lines it wrote"):
        pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))

    pool = pool_of(Executor(make=lambda number, order: Dead(order)), 2)
    pool.load_weights(weights(1))
    with pytest.raises(ProcessLost, match="was killed"):
        pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))


@pytest.mark.parametrize("seed", range(20))
def test_replicas_that_join_and_leave_change_no_response(expected, seed):
    """Between two steps, and while responses are under way, with weights that can be given and without."""
    executor = Executor(seed)
    pool, found = pool_of(executor, 2), []
    counts = iter(executor.order.choices(range(1, 5), k=20))
    for step in (1, 2):
        pool.resize(next(counts))
        pool.load_weights(weights(step))
        generation = pool.begin(PROMPTS, SAMPLING, 4, seed=step)
        for _ in range(3):
            pool._work_until(iter((False, True)).__next__)
            pool.resize(next(counts))
        if executor.order.random() < 0.5:
            pool.withdraw_weights()
            pool.resize(len(pool._replicas) + 1)
        found.append(pool.finish(generation))
    assert found == expected
    assert sum(not group.ended for group in executor.groups) == len(pool._replicas)


def test_a_replica_that_joins_is_not_waited_for_and_generates_once_its_engine_is_built():
    class Builds(Engine):
        ready = False

    executor = Executor(make=lambda number, order: (Engine if number == 0 else Builds)(order))
    executor.wait = lambda calls, timeout_s: [
        call
        for call in calls
        if any(group.under_way is call and getattr(group.engine, "ready", True) for group in executor.groups)
    ]
    pool = pool_of(executor, 1)
    pool.load_weights(weights(1))
    pool.resize(2)
    assert pool.load_weights(weights(2)) == 2
    pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))
    first, joined = executor.groups
    assert (len(first.engine.seen), joined.engine.seen) == (40, [])

    joined.engine.ready = True
    pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))
    assert joined.engine.version == 2, "the weights that the other has"
    pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0))
    assert len(joined.engine.seen) == 20


def test_what_a_replica_holds_that_leaves_is_generated_by_others():
    executor = Executor()
    pool = pool_of(executor, 2)
    pool.load_weights(weights(1))
    generation = pool.begin(PROMPTS, SAMPLING, 4, seed=0)
    pool._work_until(lambda: executor.groups[1].engine.held)
    left = len(executor.groups[1].engine.held)
    pool.resize(1)
    assert left
    assert executor.groups[1].ended
    assert len(pool.finish(generation)) == len(PROMPTS)


def test_a_replica_that_is_lost_while_it_joins_is_replaced_and_not_waited_for():
    class Dies(Engine):
        def describe(self):
            raise ProcessLost("It was killed.")

    executor = Executor(make=lambda number, order: (Dies if number == 1 else Engine)(order))
    losses = Losses()
    pool = pool_of(executor, 1, losses)
    pool.load_weights(weights(1))
    pool.resize(2)
    for step in (2, 3, 4):
        pool.load_weights(weights(step))
        assert len(pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=step))) == len(PROMPTS)
    assert len(losses.errors) == 1
    assert len(executor.groups) == 3
    assert executor.groups[2].engine.seen, "its successor has joined"


def test_a_run_goes_on_if_each_successor_of_a_lost_replica_is_lost_before_its_engine_is_built():
    class Lost(Engine):
        def poll(self, seconds):
            raise ProcessLost("It was killed.")

    class DiesEarly(Engine):
        def describe(self):
            raise ProcessLost("It was killed.")

    def make(number, order):
        return {0: Lost, 1: Engine}.get(number, DiesEarly)(order)

    executor, losses = Executor(make=make), Losses()
    pool = pool_of(executor, 2, losses)
    for step in (1, 2, 3):
        pool.load_weights(weights(step))
        assert len(pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=step))) == len(PROMPTS)
    assert len(losses.errors) > 3
    assert not any(group.engine.seen for group in executor.groups[2:])
