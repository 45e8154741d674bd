"""Several engines share the work, and whatever happens to one, each request gets the response that its seed gives.

The engines here are real in all but their model: what they answer follows from prompt, seed and weights alone. They run
in this process, and a test decides whose call is over first.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from anytron.config.schema import RolloutSection
from anytron.engines.device_memory import MemoryUse
from anytron.engines.rollout_engine import PromptInputs, Response, SamplingParams
from anytron.engines.routing import RoutingShape
from anytron.errors import ProcessLost, WorkerError
from anytron.rollout.attended import AttendedGroup
from anytron.rollout.pool import Given, RolloutPool
from anytron.trainer.weight_transfer import load, send_file

SAMPLING = SamplingParams(max_new_tokens=5)
PROMPTS = [PromptInputs((1,) * length) for length in (3, 9, 1, 4, 4, 7, 2, 8, 6, 5)]


def weights(version):
    """Weights that engines can be given, as often as it takes."""
    return partial(load, partial(send_file, SimpleNamespace(version=version)))


def response_to(request, version):
    length = request.seed % 6
    tokens = tuple((request.seed >> place) % 1000 + len(request.prompt.tokens) for place in range(length))
    return Response(tokens, (-0.5,) * length, "stop" if length < 5 else "length", (version,) * length)


class Engine:
    """Answers some of what it holds at each poll, in an order of its own."""

    def __init__(self, order):
        self.order, self.version, self.held, self.most, self.seen = order, None, [], 0, []

    def load_weights(self, manifest):
        self.version = manifest.version
        return self.version

    def submit(self, requests):
        self.held += requests
        self.seen += requests
        self.most = max(self.most, len(self.held))

    def poll(self, seconds):
        self.order.shuffle(self.held)
        done, self.held = self.held[:3], self.held[3:]
        return [(request.id, response_to(request, self.version)) for request in done]

    def sleep(self):
        self.version, self.slept = None, True
        return MemoryUse(peak=7 + self.order.randint(0, 1), released=5)

    def describe(self):
        return {"version": self.version}


class Call:
    def __init__(self, compute):
        self.compute = compute

    def result(self):
        return [self.compute()]


class Group:
    def __init__(self, engine):
        self.engine, self.under_way, self.ended = engine, None, False

    def submit(self, method, *arguments):
        assert not self.ended, "a group that has ended is not called"
        assert self.under_way is None, "a group has one call under way at a time"
        self.under_way = Call(lambda: self.answer(method, *arguments))
        return self.under_way

    def answer(self, method, *arguments):
        self.under_way = None
        return getattr(self.engine, method)(*arguments)

    def call(self, method, *arguments):
        return self.submit(method, *arguments).result()

    def end(self):
        self.ended = True


class Executor:
    """Starts engines, and says of some of the calls under way, at random, that they are over.

    ``make`` makes the n-th engine to be started.
    """

    def __init__(self, seed=0, make=lambda number, order: Engine(order)):
        self.order, self.make, self.groups, self.started = random.Random(seed), make, [], []

    def start(self, role, engine_group, engine_name, world_size, num_threads, *, replica, replicas):
        assert (role, engine_group, world_size) == ("rollout", "anytron.rollout_engines", 1)
        self.started.append((replica, replicas))
        self.groups.append(Group(self.make(len(self.groups), self.order)))
        return self.groups[-1]

    def wait(self, calls, timeout_s):
        return self.order.sample(calls, self.order.randint(1, len(calls)))


def tokens(groups):
    return [[response.tokens for response in group] for group in groups]


class Losses:
    def __init__(self, limit=100):
        self.errors, self.limit = [], limit

    def __call__(self, error, then):
        self.errors.append(error)
        if len(self.errors) > self.limit:
            raise WorkerError(error.what, why=error.why)
        assert then == "another process takes its place"


def pool_of(executor, replicas, lost=None, **settings):
    return RolloutPool(executor, RolloutSection(replicas=replicas, **settings), lost)


def two_steps(pool):
    """The responses of two steps, with new weights in between."""
    found = []
    for step in (1, 2):
        pool.load_weights(weights(step))
        found.append(pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=step)))
    return found


@pytest.fixture(scope="module")
def expected():
    steps = two_steps(pool_of(Executor(), 1))
    assert [len(groups) for groups in steps] == [10, 10]
    assert {len(group) for groups in steps for group in groups} == {4}
    assert len({response.tokens for groups in steps for group in groups for response in group}) > 60
    assert {version for group in steps[1] for response in group for version in response.versions} == {2}
    return steps


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


def extra(finished, engine):
    return [*finished, (12345, Response((), (), "stop", ()))]


def changed(**values):
    def change(finished, engine):
        response = Response((1, 2), (-0.1, -0.2), "stop", (engine.version,) * 2)
        return [(number, Response(**{**vars(response), **values})) for number, _ in finished]

    return change


WRONG = {
    "another request's": (extra, "response 12345: it was not asked for"),
    "twice": (lambda finished, engine: [*finished, *finished[:1]], "it was not asked for"),
    "log-probs": (changed(log_probs=(-0.1,)), "2 tokens have 1 log-probs and 2 versions"),
    "versions": (changed(versions=()), "2 tokens have 2 log-probs and 0 versions"),
    "length": (changed(tokens=(1,) * 6, log_probs=(0.0,) * 6, versions=(1,) * 6), "6 tokens, and 5 were allowed"),
    "aborted": (changed(stop_reason="abort"), "it was given up"),
    "mixed": (changed(versions=(0, 1)), "it comes from weights of version 0, and version 1 is current"),
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

    assert pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=0)) == honest.finish(
        honest.begin(PROMPTS, SAMPLING, 4, seed=0)
    )
    (error,) = losses.errors
    assert error.what == "Rollout replica 1 answered wrongly."
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
    assert error.why == "it has weights of version 1 and was given version 2"


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
        def start(self, *arguments, **more):
            raise AssertionError("there is no rollout process")

    executor = Nothing()
    ranks = TrainingRanks(Engine(executor.order))

    def in_place(version):
        ranks.engine.version = version
        return lambda groups: Given(version, [version] * len(groups))

    pool = RolloutPool(executor, RolloutSection(engine="megatron"), lost=None, within=ranks)
    for step, groups in enumerate(expected, start=1):
        pool.load_weights(in_place(step))
        assert pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=step)) == groups
    assert pool.describe() == [{"version": 2}]

    ranks.engine.poll = lambda seconds: [(12345, Response((), (), "stop", ()))]
    with pytest.raises(ProcessLost, match="answered wrongly"):
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
    return AttendedGroup(SimpleNamespace(submit=lambda method: Training(executor, waits)), pool)


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
    pool.settle()
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
    pool.settle()
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
        pool.settle()


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
        (lambda versions: versions[::-1], "weights of older versions follow newer ones"),
        (lambda versions: tuple(0 for _ in versions), "it comes from weights of version 0, and version"),
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
