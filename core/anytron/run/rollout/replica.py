"""One rollout engine of the pool: the call that it is in, the check of its answers, and the answers to new weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import TypeVarTuple

from anytron.base.errors import ProcessLost
from anytron.workers.engines.rollout_engine import RolloutEngine
from anytron.workers.executor.protocol import submit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack

    from anytron.base.errors import AnytronError
    from anytron.workers.engines.rollout_engine import GenerationRequest, Response, RoutingShape
    from anytron.workers.executor.protocol import Pending, WorkerGroup

    GiveWeights = Callable[[Sequence[WorkerGroup]], "WeightAnswers"]
    """Gives engines all weights of one version, and waits for it. What goes wrong in training ranks is raised."""

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")


class Replica:
    """One rollout engine, and the call that it is in.

    Args:
        index: Which of the replicas.
        group: Its process; the training ranks if these generate.

    Attributes:
        index, group: As given.
        ready: Whether its engine is built.
        version: Of the weights that it has; None if they are not the current ones.
        versions: Of all weights that it has had.
        held: The requests that it has and has not answered, by number, and how many versions were before them.
        call: The call that is under way; None between two.
        polled: Whether that call is a poll.
    """

    def __init__(self, index: int, group: WorkerGroup) -> None:
        self.index, self.group = index, group
        self.ready = False
        self.version: int | None = None
        self.versions: list[int] = []
        self.held: dict[int, tuple[GenerationRequest, int]] = {}
        self.call: Pending | None = None
        self.polled = False
        self._then: Callable[[Any], None] | None = None

    def begin(
        self,
        method: Callable[[Any, Unpack[Arguments]], Answer],
        *arguments: Unpack[Arguments],
        then: Callable[[Sequence[Answer]], None] | None = None,
    ) -> None:
        """Call the engine; ``then`` is given what its ranks answer."""
        self.call, self._then = submit(self.group, method, *arguments), then
        self.polled = method.__name__ == RolloutEngine.poll.__name__

    def hold(self, requests: Sequence[GenerationRequest]) -> None:
        """Note requests that are submitted now."""
        self.held |= {request.id: (request, len(self.versions) - 1) for request in requests}

    def take_weights(self, version: int) -> None:
        """Note the weights that the engine has now."""
        self.version = version
        self.versions.append(version)

    def finish(self, call: Pending) -> None:
        """Take the answer. Raises what the call raises."""
        self.call, self.polled = None, False
        answers = call.result()
        self.ready = True
        if self._then is not None:
            self._then(answers)

    def mistrusted(self, mistake: str) -> ProcessLost:
        """Make the error of an engine that answered wrongly; it cannot be trusted any more."""
        return ProcessLost(
            f"Rollout replica {self.index} gave a wrong answer.",
            where=f"rollout replica {self.index}",
            why=mistake,
            fix="if it happens again, the engine has a bug: report it with its log",
        )


def mistake_in(
    response: Response, request: GenerationRequest | None, versions: Sequence[int], routing: RoutingShape | None = None
) -> str | None:
    """Say what is wrong with a response; None if nothing is.

    Args:
        response: The response.
        request: What it answers; None if the engine was not asked for it, or has answered already.
        versions: Of the weights that the engine has had since it was asked, oldest first.
        routing: Of the model, if responses are to carry it.
    """
    if request is None:
        return "it was not requested"
    tokens, longest = len(response.tokens), request.sampling.max_new_tokens
    if tokens != len(response.log_probs) or tokens != len(response.versions):
        return f"{tokens} tokens have {len(response.log_probs)} log-probs and {len(response.versions)} versions"
    if tokens > longest:
        return f"it has {tokens} tokens, and {longest} were allowed"
    if response.stop_reason == "abort":
        return "it was aborted"
    if other := sorted(set(response.versions) - set(versions)):
        return f"it comes from weights of version {', '.join(map(str, other))}, and version {versions[-1]} is current"
    if list(response.versions) != sorted(response.versions):
        return "weights of older versions follow newer ones"
    if routing is not None:
        return routing.mistake_in(response.routing, len(request.prompt.tokens) + tokens)
    return None


@dataclass(frozen=True)
class WeightAnswers:
    """What became of giving weights to engines.

    Attributes:
        version: Optimizer updates behind the weights.
        answers: By place: the version that the engine says it has, or the error of one that did not get them all. Such
            an engine holds a mixture of two versions: it has ended, and the one that takes its place needs all weights.
    """

    version: int
    answers: Sequence[int | AnytronError]
