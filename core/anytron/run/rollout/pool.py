"""Rollout engines that share the prompts of a step.

The state of an engine determines its next call: first it loads new weights, at the same time as all other engines that
lack them; then it receives requests; then it is polled until they are finished. The driver waits for a call to end::

    queue, longest prompts first -+-> replica 0: load_weights, submit, poll, submit, poll, poll ... -+-> finished
                                  +-> replica 1: load_weights, submit, poll, poll, submit, poll ... -+
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import TypeVarTuple

from anytron.base.errors import ProcessLost
from anytron.base.metric import largest
from anytron.base.seeds import response_seed
from anytron.run.groups import rollout_group
from anytron.run.rollout.replica import Replica, give_weights, mistake_in, share
from anytron.workers.engines.rollout_engine import (
    GenerationRequest,
    ObservableRollout,
    RolloutEngine,
    SleepingRollout,
)
from anytron.workers.executor.protocol import submit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Unpack

    from anytron.base.errors import AnytronError, TransferError
    from anytron.config.generation import RolloutSection
    from anytron.run.rollout.replica import GiveWeights
    from anytron.serving.desk import Desk
    from anytron.workers.engines.rollout_engine import PromptInputs, Response, RoutingShape, SamplingParams
    from anytron.workers.executor.protocol import Executor, Pending, WorkerGroup

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")

POLL_S = 1.0
"""Seconds that a poll may take if no response is finished; new requests wait until the poll ends."""
VISIT_S = 0.02
"""Seconds after which the pool looks for requests of guests again, while it waits for something else."""


@dataclass(frozen=True)
class Generation:
    """Responses that are being generated.

    Attributes:
        ids: Request numbers of the responses, in order.
        samples_per_prompt: Number of consecutive responses for each prompt.
    """

    ids: tuple[int, ...]
    samples_per_prompt: int


class RolloutPool:
    """The rollout engines. Another process takes the place of one that is lost or returns invalid results.

    Meanwhile other engines take its requests; the run waits for the new one only if there is no other. Responses depend
    only on their prompts, their seeds and the weights. A new process receives weights: :meth:`load_weights`.

    Args:
        executor: Executor that starts the processes; the constructor does not wait for the engines.
        settings: Section ``rollout``.
        lost: Called for each process that is lost, with the error and with what the pool does next; raises if too many
            were lost. None = the first lost process is an error.
        within: The training ranks, if they generate: they are the only replica, and no process is started. None = start
            a process for each replica.

    Attributes:
        routing: Shape of the model's routing, if every response must carry it; None = responses carry no routing.
        guests: The clients of an endpoint, whose requests are taken whenever the driver waits in a method of this pool
            other than :meth:`finish_in_flight` and :meth:`sleep`; None = there are none.
    """

    guests: Desk | None = None

    def __init__(
        self,
        executor: Executor,
        settings: RolloutSection,
        lost: Callable[[AnytronError, str], None] | None,
        within: WorkerGroup | None = None,
    ) -> None:
        self._executor, self._settings, self._lost, self._within = executor, settings, lost, within
        self.routing: RoutingShape | None = None
        self._give: GiveWeights | None = None
        self._queue: list[GenerationRequest] = []
        self._finished: dict[int, Response] = {}
        self._cancelled: set[int] = set()
        self._answered: dict[int, Callable[[int, Response], None]] = {}
        self._admits = True
        self._requests = 0
        self._failure: BaseException | None = None
        self._replicas = [self._start(index) for index in range(settings.replicas)]

    def begin(
        self, prompts: Sequence[PromptInputs], sampling: SamplingParams, samples_per_prompt: int, seed: int
    ) -> Generation:
        """Ask for responses to each prompt; they are generated while the driver waits in a method of this pool.

        A response does not depend on the replica that generates it, nor on the other responses there.

        Args:
            prompts: The prompts.
            sampling: Sampling parameters.
            samples_per_prompt: Number of responses for each prompt.
            seed: Seed from which, with the response's place, the seed of each response is derived.
        """
        asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        numbers = self.ask([(prompt, sampling, response_seed(seed, place)) for place, prompt in enumerate(asked)])
        self._begin_calls()
        return Generation(tuple(numbers), samples_per_prompt)

    def finish(self, generation: Generation) -> list[list[Response]]:
        """Wait for responses; return the responses to each prompt, in order."""
        wanted = frozenset(generation.ids)
        self._work_until(lambda: self._finished.keys() >= wanted)
        responses = [self._finished.pop(number) for number in generation.ids]
        size = generation.samples_per_prompt
        return [responses[start : start + size] for start in range(0, len(responses), size)]

    def attend(self, call: Pending) -> None:
        """Keep all replicas at work until a call of another group of the executor is over.

        An error of the replicas meanwhile is raised when they are next needed, so that the call of the other group can
        finish.
        """
        if self._failure is None:
            with contextlib.suppress(Exception):
                self._work_until(lambda: call.done, call)

    def finish_in_flight(self) -> None:
        """Finish all responses that were begun, as long as a replica has weights."""
        with self._without_guests():
            self._work_until(
                lambda: not (self._queue or any(replica.held for replica in self._replicas)) or not self.has_weights
            )

    def ask(
        self,
        questions: Sequence[tuple[PromptInputs, SamplingParams, int]],
        answered: Callable[[int, Response], None] | None = None,
    ) -> list[int]:
        """Ask for a response to each (prompt, sampling parameters, seed); return the request numbers.

        Args:
            questions: The requests.
            answered: Called with number and response of each request when it has finished; None = :meth:`poll` or
                :meth:`finish` returns them.
        """
        requests = [GenerationRequest(self._requests + place, *one) for place, one in enumerate(questions)]
        self._requests += len(requests)
        if answered is not None:
            self._answered |= {request.id: answered for request in requests}
        # The longest prompts come first: they take longest, and nothing should begin late that does.
        self._queue += sorted(requests, key=lambda request: -len(request.prompt.tokens))
        return [request.id for request in requests]

    def cancel(self, numbers: Collection[int]) -> None:
        """Give requests up: they are never returned. An engine drops them when its current call is over."""
        self._queue = [request for request in self._queue if request.id not in numbers]
        for number in numbers:
            self._finished.pop(number, None)
            self._answered.pop(number, None)
        self._cancelled |= {number for replica in self._replicas for number in replica.held if number in numbers}

    @property
    def has_weights(self) -> bool:
        """Whether any replica has weights to generate with."""
        return any(replica.version is not None for replica in self._replicas)

    def poll(self, seconds: float, *others: Pending) -> list[tuple[int, Response]]:
        """Keep all replicas at work for about the given time, or until a call returns.

        Returns:
            Number and response of each request that has finished since the last poll, unless it was asked for with
            ``answered``; each is returned once.
        """
        if not self._finished:
            self._begin_calls()
            self._work(seconds, *others)
        finished, self._finished = list(self._finished.items()), {}
        return finished

    def load_weights(self, give: GiveWeights) -> int:
        """Send new weights to all replicas at the same time; return their version. Responses in progress use them.

        A replica that receives only a part of the weights is replaced before it generates. Until
        :meth:`withdraw_weights`, the weights are also sent to the successor of each replica that is lost or replaced,
        and to replicas that join.
        """
        self._give = give
        for replica in self._replicas:
            replica.version = None
        self._work_until(lambda: all(each.version is not None for each in self._replicas if each.awaited))
        (version,) = {replica.version for replica in self._replicas if replica.awaited}
        assert version is not None, "that was waited for"
        return version

    def resize(self, count: int) -> None:
        """Start or end replicas, so that there are ``count``. New ones join when their engines are built.

        Other replicas generate the responses of those that leave, with the same tokens.

        Raises:
            AnytronError: The executor could not start a process. The replicas that it has started stay.
        """
        while len(self._replicas) > count:
            self._queue = [*self._abandoned(self._replicas.pop()), *self._queue]
        self._settings = self._settings.model_copy(update={"replicas": count})
        for index in range(len(self._replicas), count):
            self._replicas.append(self._start(index, joins=True))

    @property
    def failed(self) -> bool:
        """Whether a call failed, so that the replicas can no longer be used."""
        return self._failure is not None or any(replica.group.ended for replica in self._replicas)

    def withdraw_weights(self) -> None:
        """Mark the weights as no longer available, because training changes them; return when all replicas are at work.

        A replica that is lost from now on has a successor that waits for the next weights; meanwhile other replicas
        generate its responses.
        """
        # A poll goes on while the driver does something else.
        self._work_until(lambda: all(replica.polled or not replica.held for replica in self._replicas))
        self._give = None

    def sleep(self) -> dict[str, float]:
        """Make all replicas free their devices' memory until they receive weights; return memory metrics."""
        with self._without_guests():
            self.finish_in_flight()  # an engine that sleeps has no requests
            self._give = None  # those who sleep wait for the next weights, and so do their successors
            found = [self._ask(one.index, SleepingRollout.sleep) for one in list(self._replicas) if one.awaited]
        for replica in self._replicas:
            replica.version = None
        return {
            **largest("memory/rollout_peak_bytes", [one.peak for one in found]),
            "memory/asleep_bytes": sum(one.released for one in found),
        }

    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute whole logits: float32 ``[L, V]`` for each sequence of L tokens; they take much memory."""
        return self._ask(0, ObservableRollout.logits, sequences)

    def describe(self) -> list[Mapping[str, Any]]:
        """Return facts about each replica, for the run's records."""
        return [self._ask(index, RolloutEngine.describe) for index in range(len(self._replicas))]

    @contextlib.contextmanager
    def _without_guests(self) -> Iterator[None]:
        before, self._admits = self._admits, False
        try:
            yield
        finally:
            self._admits = before

    def _start(self, index: int, *, joins: bool = False) -> Replica:
        if self._within is not None:
            return Replica(index, self._within)
        return Replica(index, self._executor.start(rollout_group(self._settings, index)), joins=joins)

    def _ask(
        self, index: int, method: Callable[[Any, Unpack[Arguments]], Answer], *arguments: Unpack[Arguments]
    ) -> Answer:
        """Call a method of one replica, between generations; again, if its process is lost on the way."""
        while True:
            self._work_until(lambda: self._free(self._replicas[index]))
            replica = self._replicas[index]
            try:
                return submit(replica.group, method, *arguments).result()[0]
            except ProcessLost as error:
                self._replace(replica, error)

    def _free(self, replica: Replica) -> bool:
        return replica.call is None and (self._give is None or replica.version is not None)

    def _work_until(self, done: Callable[[], bool], *others: Pending) -> None:
        """Keep all replicas at work until ``done()`` is true; also wait for ``others``, calls of other groups.

        After an error or a signal, the replicas can no longer be used: some may have ended in the middle of a call.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._begin_calls()
            while not done():
                self._work(math.inf, *others)
                self._begin_calls()
        except BaseException as failure:
            self._failure = failure
            raise

    def _work(self, timeout_s: float, *others: Pending) -> None:
        """Send weights if replicas wait for them; otherwise wait until a call ends, and process its answer."""
        if self._give_weights():
            return
        if self.guests is not None:
            if self._admits:
                self.guests.visit(self)
                self._begin_calls()
            timeout_s = min(timeout_s, VISIT_S)
        working = {replica.call: replica for replica in self._replicas if replica.call is not None}
        if not (working or others):  # only guests could give it work
            time.sleep(timeout_s)
            return
        for call in self._executor.wait([*working, *others], timeout_s):
            replica = working.get(call)
            if replica is None:
                continue
            try:
                replica.finish(call)
            except ProcessLost as error:
                self._replace(replica, error)

    def _begin_calls(self) -> None:
        for replica in self._replicas:
            if replica.call is None:
                self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        """Let a replica do what comes next for it, if anything does."""
        if not replica.ready:
            replica.begin(RolloutEngine.describe)
        elif replica.version is None:
            return
        elif given_up := sorted(self._cancelled & replica.held.keys()):
            replica.begin(RolloutEngine.abort, given_up, then=lambda _: self._drop(replica, given_up))
        elif requests := self._share_of(replica):
            replica.hold(requests)
            replica.begin(RolloutEngine.submit, requests)
        elif replica.held:
            replica.begin(RolloutEngine.poll, POLL_S, then=lambda answers: self._take(replica, answers))

    def _give_weights(self) -> bool:
        """Send weights to replicas that lack them, once each can take them; return whether weights were sent."""
        lacking = [replica for replica in self._replicas if replica.version is None and replica.awaited]
        if self._give is None or not lacking or any(replica.call is not None for replica in lacking):
            return False
        for replica, error in give_weights(self._give, lacking):
            self._replace(replica, error)
        return True

    def _share_of(self, replica: Replica) -> list[GenerationRequest]:
        """Take requests from the queue until the replica holds an equal part of all unfinished requests."""
        # A replica that cannot get weights yet takes no part.
        taking = [one for one in self._replicas if one.awaited and (one.version is not None or self._give is not None)]
        mixed = self.guests is not None
        count = share(replica, taking, self._queue, self._settings.max_batch_size, temperatures_differ=mixed)
        given, self._queue = self._queue[:count], self._queue[count:]
        return given

    def _take(self, replica: Replica, answers: Sequence[Sequence[tuple[int, Response]]]) -> None:
        for number, response in itertools.chain.from_iterable(answers):
            request, before = replica.held.get(number, (None, 0))
            if mistake := mistake_in(response, request, replica.versions[before:], self.routing):
                raise replica.mistrusted(f"response {number}: {mistake}")
            del replica.held[number]
            if number in self._cancelled:
                self._cancelled.remove(number)
            elif (answered := self._answered.pop(number, None)) is not None:
                answered(number, response)
            else:
                self._finished[number] = response

    def _drop(self, replica: Replica, numbers: Collection[int]) -> None:
        """Forget requests that an engine has dropped."""
        self._cancelled -= set(numbers)
        for number in numbers:
            del replica.held[number]

    def _replace(self, replica: Replica, error: ProcessLost | TransferError) -> None:
        kept = self._abandoned(replica)
        if self._lost is None:
            raise error
        self._lost(error, "another process takes its place")
        self._queue = [*kept, *self._queue]
        others = any(one.awaited for one in self._replicas if one is not replica)
        self._replicas[replica.index] = self._start(replica.index, joins=others)

    def _abandoned(self, replica: Replica) -> list[GenerationRequest]:
        """End a replica's process; return its requests."""
        replica.group.end()
        kept = [request for number, (request, _) in replica.held.items() if number not in self._cancelled]
        self._cancelled -= replica.held.keys()
        return kept
