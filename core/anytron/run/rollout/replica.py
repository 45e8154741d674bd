"""One rollout engine of the pool, and the call that it is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import TypeVarTuple

from anytron.base.errors import ProcessLost
from anytron.workers.engines.rollout_engine import RolloutEngine
from anytron.workers.remote import submit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack

    from anytron.workers.engines.rollout_engine import GenerationRequest
    from anytron.workers.executor.protocol import Pending, WorkerGroup

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
            f"Rollout replica {self.index} answered wrongly.",
            where=f"rollout replica {self.index}",
            why=mistake,
            fix="if it happens again, the engine has a bug: report it with its log",
        )
