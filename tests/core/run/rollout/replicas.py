"""Replicas for tests of the pool: engines that are real in all but their model.

What they answer follows from prompt, seed and weights alone. They run in this process, and a test decides whose call is
over first.
"""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

from anytron.base.errors import WorkerError
from anytron.config.generation import RolloutSection
from anytron.run.rollout.pool import RolloutPool
from anytron.run.trainer.weight_transfer import load, send_file
from anytron.workers.engines.device_memory import MemoryUse
from anytron.workers.engines.rollout_engine import PromptInputs, Response, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=5)
PROMPTS = [PromptInputs((1,) * length) for length in (3, 9, 1, 4, 4, 7, 2, 8, 6, 5)]


def weights(version):
    """Weights that engines can be given, as often as it takes."""
    return partial(load, partial(send_file, SimpleNamespace(version=version)), "weights")


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

    def abort(self, ids):
        gone = [request for request in self.held if request.id in ids]
        self.held = [request for request in self.held if request.id not in ids]
        self.aborted = [*getattr(self, "aborted", []), *(request.id for request in gone)]
        return [(request.id, Response((), (), "abort", ())) for request in gone]

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

    def start(self, spec):
        assert (spec.role, spec.engine_group, spec.world_size) == ("rollout", "anytron.rollout_engines", 1)
        self.started.append((spec.replica, spec.replicas))
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
