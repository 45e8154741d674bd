"""Rollout engines that share the prompts of a step.

What an engine does next follows from what it has: new weights first, then requests, then polls for as long as it
holds any. The driver waits for whichever replica has something to say::

    queue, longest prompts first -+-> replica 0: load_weights, submit, poll, submit, poll, poll ... -+-> finished
                                  +-> replica 1: load_weights, submit, poll, poll, submit, poll ... -+
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.engines.protocol import GenerationRequest
from anytron.errors import ProcessLost
from anytron.rollout.checks import mistake_in
from anytron.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from anytron.config.schema import RolloutSection
    from anytron.engines.protocol import PromptInputs, Response, SamplingParams
    from anytron.engines.weights import WeightManifest
    from anytron.executor.protocol import Executor, Pending, WorkerGroup

POLL_S = 1.0
"""How long a poll may take if nothing finishes: new requests wait for its end."""


class Replica:
    """One rollout engine, and the call that it is in.

    Args:
        index: Which of the replicas.
        group: Its process.

    Attributes:
        index, group: As given.
        weights: Those that it has; None before the first.
        held: The requests that it has and has not answered, by number.
        call: The call that is under way; None between two.
    """

    def __init__(self, index: int, group: WorkerGroup) -> None:
        self.index, self.group = index, group
        self.weights: WeightManifest | None = None
        self.held: dict[int, GenerationRequest] = {}
        self.call: Pending | None = None
        self._then: Callable[[Any], None] | None = None

    def begin(self, method: str, argument: object, then: Callable[[Any], None] | None = None) -> None:
        """Call the engine; ``then`` is given what it answers."""
        self.call, self._then = self.group.submit(method, argument), then

    def finish(self, call: Pending) -> None:
        """Take the answer. Raises what the call raises."""
        self.call = None
        (answer,) = call.result()
        if self._then is not None:
            self._then(answer)


class RolloutPool:
    """The rollout engines. One that is lost or answers wrongly is replaced, and others make its responses.

    Nothing is lost with a process: its weights can be had again, and its responses follow from their seeds.

    Args:
        executor: Starts the processes; the constructor does not wait for the engines.
        settings: Section ``rollout``.
        lost: Is told of each loss and of what follows, and raises if it is one too many; None = the first is.
    """

    def __init__(
        self, executor: Executor, settings: RolloutSection, lost: Callable[[ProcessLost, str], None] | None
    ) -> None:
        self._executor, self._settings, self._lost = executor, settings, lost
        self._weights: WeightManifest | None = None
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
        requests = [
            GenerationRequest(self._requests + place, prompt, sampling, derive_seed(seed, "response", place))
            for place, prompt in enumerate(asked)
        ]
        self._requests += len(requests)
        self._enqueue(requests)
        self._work_until(lambda: len(self._finished) == len(requests))
        responses = [self._finished.pop(request.id) for request in requests]
        starts = range(0, len(responses), samples_per_prompt)
        return [responses[start : start + samples_per_prompt] for start in starts]

    def load_weights(self, manifest: WeightManifest) -> None:
        """Give all replicas new weights at the same time; each verifies every checksum."""
        self._weights = manifest
        self._work_until(lambda: all(replica.weights is manifest for replica in self._replicas))

    def logits(self, sequences: Sequence[PromptInputs]) -> list[Tensor]:
        """Compute whole logits, float32 ``[L, V]`` for each sequence; for few of them."""
        logits: list[Tensor] = self._ask(0, "logits", sequences)
        return logits

    def describe(self) -> list[Mapping[str, Any]]:
        """Facts of each replica, for the run's records."""
        return [self._ask(index, "describe") for index in range(len(self._replicas))]

    def _start(self, index: int) -> Replica:
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
            self._work_until(lambda: self._replicas[index].weights is self._weights)
            replica = self._replicas[index]
            try:
                return replica.group.call(method, *arguments)[0]
            except ProcessLost as error:
                self._replace(replica, error)

    def _work_until(self, done: Callable[[], bool]) -> None:
        """Keep all replicas at work until something is so."""
        while not done():
            for replica in self._replicas:
                if replica.call is None:
                    self._begin(replica)
            working = {replica.call: replica for replica in self._replicas if replica.call is not None}
            for call in self._executor.wait(list(working)):
                replica = working[call]
                try:
                    replica.finish(call)
                except ProcessLost as error:
                    self._replace(replica, error)

    def _begin(self, replica: Replica) -> None:
        """Let a replica do what comes next for it, if anything does."""
        weights = self._weights
        if replica.weights is not weights:
            assert weights is not None, "weights are never taken back"
            replica.begin("load_weights", weights, lambda version: self._loaded(replica, weights, version))
        elif share := self._share_of(replica):
            replica.held |= {request.id: request for request in share}
            replica.begin("submit", share)
        elif replica.held:
            replica.begin("poll", POLL_S, lambda finished: self._take(replica, finished))

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

    def _loaded(self, replica: Replica, weights: WeightManifest, version: int) -> None:
        if version != weights.version:
            raise _wrong(replica, f"it has weights of version {version} and was given version {weights.version}")
        replica.weights = weights

    def _take(self, replica: Replica, finished: Sequence[tuple[int, Response]]) -> None:
        assert replica.weights is not None, "a poll comes after requests, and those after weights"
        for number, response in finished:
            request = replica.held.get(number)
            if mistake := mistake_in(response, request, replica.weights.version):
                raise _wrong(replica, f"response {number}: {mistake}")
            del replica.held[number]
            self._finished[number] = response

    def _replace(self, replica: Replica, error: ProcessLost) -> None:
        replica.group.end()
        if self._lost is None:
            raise error
        self._lost(error, "another process takes its place")
        self._enqueue(list(replica.held.values()))
        self._replicas[replica.index] = self._start(replica.index)


def _wrong(replica: Replica, mistake: str) -> ProcessLost:
    """Make the error of a replica that cannot be trusted any more."""
    return ProcessLost(
        f"Rollout replica {replica.index} answered wrongly.",
        where=f"rollout replica {replica.index}",
        why=mistake,
        fix="if it happens again, the engine has a bug: report it with its log",
    )
