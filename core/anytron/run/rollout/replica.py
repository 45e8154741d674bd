"""One rollout engine of the pool: its current call, the check of its results, and the outcome of loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import TypeVarTuple

from anytron.base.errors import ProcessLost, TransferError
from anytron.workers.engines.rollout_engine import RolloutEngine
from anytron.workers.executor.protocol import submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Unpack

    from anytron.base.errors import AnytronError
    from anytron.workers.engines.rollout_engine import GenerationRequest, Response, RoutingShape
    from anytron.workers.executor.protocol import Pending, WorkerGroup

    GiveWeights = Callable[[Sequence[WorkerGroup]], "WeightAnswers"]
    """Sends engines all weights of one version, and waits. Errors of training ranks are raised."""

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")


class Replica:
    """One rollout engine, and its current call.

    Args:
        index: Index of the replica.
        group: Process of the replica; the training ranks if they generate.
        joins: Whether the replica joins a run that goes on, which does not wait for it.

    Attributes:
        index, group, joins: The arguments.
        ready: Whether the engine is built.
        version: Version of the engine's weights; None if they are not the current ones.
        versions: Versions of all weights that the engine has had, oldest first.
        held: Unanswered requests by number, each with the index in ``versions`` of the weights at its submission.
        call: The current call; None between calls.
        polled: Whether the current call is a poll.
    """

    def __init__(self, index: int, group: WorkerGroup, *, joins: bool = False) -> None:
        self.index, self.group, self.joins = index, group, joins
        self.ready = False
        self.version: int | None = None
        self.versions: list[int] = []
        self.held: dict[int, tuple[GenerationRequest, int]] = {}
        self.call: Pending | None = None
        self.polled = False
        self._then: Callable[[Any], None] | None = None

    @property
    def awaited(self) -> bool:
        """Whether the run waits for this replica: its engine is built, or it has been there from the start."""
        return self.ready or not self.joins

    def begin(
        self,
        method: Callable[[Any, Unpack[Arguments]], Answer],
        *arguments: Unpack[Arguments],
        then: Callable[[Sequence[Answer]], None] | None = None,
    ) -> None:
        """Call the engine; ``then`` is called with the results of its ranks."""
        self.call, self._then = submit(self.group, method, *arguments), then
        self.polled = method.__name__ == RolloutEngine.poll.__name__

    def hold(self, requests: Sequence[GenerationRequest]) -> None:
        """Record requests that are submitted now."""
        self.held |= {request.id: (request, len(self.versions) - 1) for request in requests}

    def take_weights(self, version: int) -> None:
        """Record the version of the weights that the engine holds now."""
        self.version = version
        self.versions.append(version)

    def finish(self, call: Pending) -> None:
        """Process the result of the current call. An exception of the call is raised here."""
        self.call, self.polled = None, False
        answers = call.result()
        self.ready = True
        if self._then is not None:
            self._then(answers)

    def mistrusted(self, mistake: str) -> ProcessLost:
        """Make the error for an engine that returned an invalid result and can no longer be trusted."""
        return ProcessLost(
            f"Rollout replica {self.index} returned an invalid result.",
            where=f"rollout replica {self.index}",
            why=mistake,
            fix="if it happens again, the engine has a bug: report it with its log",
        )


def mistake_in(
    response: Response, request: GenerationRequest | None, versions: Sequence[int], routing: RoutingShape | None = None
) -> str | None:
    """Return what is wrong with a response; None if nothing is.

    Args:
        response: The response.
        request: The request of the response; None if the engine did not receive it, or has answered it already.
        versions: Versions of the engine's weights since the request, oldest first.
        routing: Shape of the model's routing, if responses must carry it; None = the routing is not checked.
    """
    if request is None:
        return "it was not requested"
    tokens, longest = len(response.tokens), request.sampling.max_new_tokens
    if tokens != len(response.log_probs) or tokens != len(response.versions):
        return f"{tokens} tokens have {len(response.log_probs)} log-probs and {len(response.versions)} versions"
    if tokens > longest:
        return f"it has {tokens} tokens, but only {longest} were allowed"
    if response.stop_reason == "abort":
        return "it was aborted"
    sampling = request.sampling
    ends = [place for place, token in enumerate(response.tokens, start=1) if token in sampling.end_token_ids]
    if early := [place for place in ends if sampling.min_new_tokens <= place < tokens]:
        return f"it goes on after an end token, its {early[0]}. of {tokens} tokens"
    found = [version for version, _ in response.version_runs]
    if other := sorted(set(found) - set(versions)):
        return f"it comes from weights of version {', '.join(map(str, other))}, but version {versions[-1]} is current"
    if any(later < earlier for earlier, later in pairwise(found)):
        return "its weight versions are not in ascending order"
    if routing is not None:
        return routing.mistake_in(response.routing, len(request.prompt.tokens) + tokens)
    return None


def share(
    replica: Replica,
    taking: Sequence[Replica],
    queue: Sequence[GenerationRequest],
    limit: int,
    *,
    temperatures_differ: bool,
) -> int:
    """Return how many requests of the queue to give to a replica, so that all replicas hold about equally many.

    Args:
        replica: The replica.
        taking: All replicas that take a part, with this one.
        queue: The requests that no replica has.
        limit: Most requests that a replica may hold (``rollout.max_batch_size``).
        temperatures_differ: Whether the temperatures of the requests may differ. An engine has one at a time: the part
            ends at the first request that has another temperature than what the replica holds.
    """
    if not queue:
        return 0
    part = -(-(len(queue) + sum(len(one.held) for one in taking)) // len(taking))
    count = max(0, min(part, limit) - len(replica.held))
    if temperatures_differ:
        (first, _) = next(iter(replica.held.values()), (queue[0], 0))
        wanted = first.sampling.temperature
        count = min(count, sum(1 for _ in takewhile(lambda one: one.sampling.temperature == wanted, queue)))
    return count


@dataclass(frozen=True)
class WeightAnswers:
    """The outcome of loading weights into the engines.

    Attributes:
        version: Version of the weights that were sent: the number of completed optimizer updates.
        answers: For each engine, in order: the version that it reports, or the error if it did not receive all weights.
            An engine with an error may hold a mixture of two versions, and must be replaced.
    """

    version: int
    answers: Sequence[int | AnytronError]


def give_weights(
    give: GiveWeights, replicas: Sequence[Replica]
) -> Iterator[tuple[Replica, ProcessLost | TransferError]]:
    """Send weights to replicas; yield those that must be replaced, each with the error. Other errors are raised."""
    given = give([replica.group for replica in replicas])
    for replica, answer in zip(replicas, given.answers, strict=True):
        if isinstance(answer, (ProcessLost, TransferError)):
            yield replica, answer
        elif isinstance(answer, Exception):
            raise answer
        elif answer != given.version:
            mistake = f"it has weights of version {answer}, but version {given.version} was sent"
            yield replica, replica.mistrusted(mistake)
        else:
            replica.take_weights(answer)
