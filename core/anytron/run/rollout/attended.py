"""Training ranks that are waited for while responses are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.run.rollout.conversations import Conversations, SingleTurns
    from anytron.workers.executor.protocol import Host, Pending, WorkerGroup


class AttendedGroup:
    """A :class:`~anytron.workers.executor.protocol.WorkerGroup` whose calls leave replicas and environments no pause.

    A replica generates while it is polled, and the driver polls it whenever it waits: here, for the training ranks.

    Args:
        group: The training ranks.
        turns: The responses that are made meanwhile.
    """

    def __init__(self, group: WorkerGroup, turns: SingleTurns | Conversations) -> None:
        self._group, self._turns = group, turns

    @property
    def size(self) -> int:
        """Ranks."""
        return self._group.size

    @property
    def hosts(self) -> Sequence[Host]:
        """The machine of each rank."""
        return self._group.hosts

    @property
    def ended(self) -> bool:
        """Whether the processes have ended."""
        return self._group.ended

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method on all ranks without waiting."""
        return self._group.submit(method, *args, **kwargs)

    def submit_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> Pending:
        """Call a method on all ranks, each with its own arguments, without waiting."""
        return self._group.submit_each(method, per_rank_args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks, and go on with responses until it is done."""
        return self._wait(self.submit(method, *args, **kwargs))

    def scatter(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on all ranks, each with its own arguments, and go on with responses until it is done."""
        return self._wait(self.submit_each(method, per_rank_args))

    def rebuild(self, config: RunConfig) -> None:
        """Build engines of another configuration in the same processes."""
        self._group.rebuild(config)

    def end(self) -> None:
        """End the processes without a word to their engines."""
        self._group.end()

    def _wait(self, call: Pending) -> list[Any]:
        self._turns.attend(call)
        return list(call.result())
