"""Rollout engines that share the prompts of a step.

What an engine does next follows from what it has: new weights first, which all that lack them get together, then
requests, then polls for as long as it holds any. The driver waits for whichever replica has something to say::

    queue, longest prompts first -+-> replica 0: load_weights, submit, poll, submit, poll, poll ... -+-> finished
                                  +-> replica 1: load_weights, submit, poll, poll, submit, poll ... -+
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.engines.protocol import GenerationRequest
from anytron.errors import ProcessLost, TransferError
from anytron.rollout.checks import mistake_in
from anytron.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from anytron.config.schema import RolloutSection
    from anytron.engines.protocol import MemoryUse, PromptInputs, Response, SamplingParams
    from anytron.engines.routing import RoutingShape
    from anytron.errors import AnytronError
    from anytron.executor.protocol import Executor, Pending, WorkerGroup

    GiveWeights = Callable[[Sequence[WorkerGroup]], "Given"]
    """Gives engines all weights of one version, and waits for it. What goes wrong in training ranks is raised."""

POLL_S = 1.0
"""How long a poll may take if nothing finishes: new requests wait for its end."""


@dataclass(frozen=True)
class Given:
    """What became of giving weights to engines.

    Attributes:
        version: Optimizer updates behind the weights.
        answers: By place: the version that the engine says it has, or the error of one that did not get them all. Such
            an engine holds a mixture of two versions: it has ended, and the one that takes its place needs all weights.
    """

    version: int
    answers: Sequence[int | AnytronError]


class Replica:
    """One rollout engine, and the call that it is in.

    Args:
        index: Which of the replicas.
        group: Its process; the training ranks if these generate.

    Attributes:
        index, group: As given.
        ready: Whether its engine is built.
        version: Of the weights that it has; None if they are not the current ones.
        held: The requests that it has and has not answered, by number.
        call: The call that is under way; None between two.
    """

    def __init__(self, index: int, group: WorkerGroup) -> None:
        self.index, self.group = index, group
        self.ready = False
        self.version: int | None = None
        self.held: dict[int, GenerationRequest] = {}
        self.call: Pending | None = None
        self._then: Callable[[Any], None] | None = None

    def begin(self, method: str, *arguments: object, then: Callable[[Any], None] | None = None) -> None:
        """Call the engine; ``then`` is given what its ranks answer."""
        self.call, self._then = self.group.submit(method, *arguments), then

    def finish(self, call: Pending) -> None:
        """Take the answer. Raises what the call raises."""
        self.call = None
        answers = call.result()
        self.ready = True
        if self._then is not None:
            self._then(answers)


class RolloutPool:
    """The rollout engines. One that is lost or answers wrongly is replaced, and others make its responses.

    Nothing is lost with a process: its weights can be had again, and its responses follow from their seeds.

    Args:
        executor: Starts the processes; the constructor does not wait for the engines.
        settings: Section ``rollout``.
        lost: Is told of each loss and of what follows, and raises if it is one too many; None = the first is.
        within: The training ranks, if these generate: the only replica, and none is started.

    Attributes:
        routing: Of the model, if every response must carry it; None = none does.
    """

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
        self._requests = 0
        self._replicas = [self._start(index) for index in range(settings.replicas)]

    def generate(
        self, prompts: Sequence[PromptInputs], sampling: SamplingParams, samples_per_prompt: int, seed: int
    ) -> list[list[Response]]:
        """Sample responses for each prompt, in order.

        Which replica makes a response, and beside which others, changes nothing in it.

        Args:
            prompts: What responses are made for.
            sampling: How to sample.
            samples_per_prompt: Responses for each prompt.
            seed: The seed of each response follows from it and from the response's place.
        """
        asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        numbers = self.ask([(prompt, sampling, response_seed(seed, place)) for place, prompt in enumerate(asked)])
        self._work_until(lambda: len(self._finished) == len(numbers))
        responses = [self._finished.pop(number) for number in numbers]
        starts = range(0, len(responses), samples_per_prompt)
        return [responses[start : start + samples_per_prompt] for start in starts]

    def ask(self, questions: Sequence[tuple[PromptInputs, SamplingParams, int]]) -> list[int]:
        """Ask for a response to each of these (prompt, how to sample, seed); return their numbers."""
        requests = [GenerationRequest(self._requests + place, *one) for place, one in enumerate(questions)]
        self._requests += len(requests)
        self._enqueue(requests)
        return [request.id for request in requests]

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Keep all replicas at work for about so long at most, or until one has something to say.

        Returns:
            Number and response of what has finished since the last poll; each is given once.
        """
        if not self._finished:
            self._work(seconds)
        finished, self._finished = list(self._finished.items()), {}
        return finished

    def load_weights(self, give: GiveWeights) -> int:
        """Give all replicas new weights at the same time; return their version.

        A replica that gets only a part of them never generates: it is replaced, and its successor is given all.
        """
        self._give = give
        for replica in self._replicas:
            replica.version = None
        self._work_until(lambda: all(replica.version is not None for replica in self._replicas))
        (version,) = {replica.version for replica in self._replicas}
        assert version is not None, "that was waited for"
        return version

    def sleep(self) -> dict[str, float]:
        """Let all replicas give their devices' memory back until they get weights; return it as metrics."""
        self._give = None  # those who sleep wait for the next weights, and so do their successors
        found: list[MemoryUse] = [self._ask(index, "sleep") for index in range(len(self._replicas))]
        for replica in self._replicas:
            replica.version = None
        return {
            "memory/rollout_peak_bytes": max(one.peak for one in found),
            "memory/asleep_bytes": sum(one.released for one in found),
        }

    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute whole logits, float32 ``[L, V]`` for each sequence; for few of them."""
        logits: list[Tensor] = self._ask(0, "logits", sequences)
        return logits

    def describe(self) -> list[Mapping[str, Any]]:
        """Facts of each replica, for the run's records."""
        return [self._ask(index, "describe") for index in range(len(self._replicas))]

    def _start(self, index: int) -> Replica:
        if self._within is not None:
            return Replica(index, self._within)
        settings = self._settings
        engine, threads = settings.engine, settings.num_threads
        start = self._executor.start
        return Replica(
            index,
            start("rollout", "anytron.rollout_engines", engine, 1, threads, replica=index, replicas=settings.replicas),
        )

    def _ask(self, index: int, method: str, *arguments: object) -> Any:
        """Call a method of one replica, between generations; again, if its process is lost on the way."""
        while True:
            self._work_until(lambda: self._give is None or self._replicas[index].version is not None)
            replica = self._replicas[index]
            try:
                return replica.group.call(method, *arguments)[0]
            except ProcessLost as error:
                self._replace(replica, error)

    def _work_until(self, done: Callable[[], bool]) -> None:
        """Keep all replicas at work until something is so."""
        while not done():
            self._work(math.inf)

    def _work(self, timeout_s: float) -> None:
        """Let each replica do what comes next for it, and wait until a call is over."""
        for replica in self._replicas:
            if replica.call is None:
                self._begin(replica)
        if self._give_weights():
            return
        working = {replica.call: replica for replica in self._replicas if replica.call is not None}
        for call in self._executor.wait(list(working), timeout_s):
            replica = working[call]
            try:
                replica.finish(call)
            except ProcessLost as error:
                self._replace(replica, error)

    def _begin(self, replica: Replica) -> None:
        """Let a replica do what comes next for it, if anything does."""
        if not replica.ready:
            replica.begin("describe")
        elif replica.version is None:
            return
        elif share := self._share_of(replica):
            replica.held |= {request.id: request for request in share}
            replica.begin("submit", share)
        elif replica.held:
            replica.begin("poll", POLL_S, then=lambda answers: self._take(replica, answers))

    def _give_weights(self) -> bool:
        """Give the weights to those that lack them, once each of these can take them; return whether it was time to."""
        lacking = [replica for replica in self._replicas if replica.version is None]
        if self._give is None or not lacking or any(replica.call is not None for replica in lacking):
            return False
        given = self._give([replica.group for replica in lacking])
        for replica, answer in zip(lacking, given.answers, strict=True):
            if isinstance(answer, (ProcessLost, TransferError)):
                self._replace(replica, answer)
            elif isinstance(answer, Exception):
                raise answer
            elif answer != given.version:
                mistake = f"it has weights of version {answer} and was given version {given.version}"
                self._replace(replica, _wrong(replica, mistake))
            else:
                replica.version = answer
        return True

    def _share_of(self, replica: Replica) -> list[GenerationRequest]:
        """Take from the queue what brings a replica to its equal part of all that is not finished."""
        held = [len(each.held) for each in self._replicas]
        part = -(-(len(self._queue) + sum(held)) // len(held))
        count = max(0, min(part, self._settings.max_batch_size) - len(replica.held))
        share, self._queue = self._queue[:count], self._queue[count:]
        return share

    def _enqueue(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, longest prompts first: they take longest, and nothing should begin late that does."""
        self._queue = sorted([*self._queue, *requests], key=lambda request: -len(request.prompt.tokens))

    def _take(self, replica: Replica, answers: Sequence[Sequence[tuple[int, Response]]]) -> None:
        assert replica.version is not None, "a poll comes after requests, and those after weights"
        for number, response in itertools.chain.from_iterable(answers):
            request = replica.held.get(number)
            if mistake := mistake_in(response, request, replica.version, self.routing):
                raise _wrong(replica, f"response {number}: {mistake}")
            del replica.held[number]
            self._finished[number] = response

    def _replace(self, replica: Replica, error: ProcessLost | TransferError) -> None:
        replica.group.end()
        if self._lost is None:
            raise error
        self._lost(error, "another process takes its place")
        self._enqueue(list(replica.held.values()))
        self._replicas[replica.index] = self._start(replica.index)


def response_seed(seed: int, place: int) -> int:
    """The seed of a response, from its step's and its place among the step's responses."""
    return derive_seed(seed, "response", place)


def _wrong(replica: Replica, mistake: str) -> ProcessLost:
    """Make the error of a replica that cannot be trusted any more."""
    return ProcessLost(
        f"Rollout replica {replica.index} answered wrongly.",
        where=f"rollout replica {replica.index}",
        why=mistake,
        fix="if it happens again, the engine has a bug: report it with its log",
    )
