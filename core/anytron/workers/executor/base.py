"""What executors whose workers are processes have in common: what they tell them, and how they end them."""

from __future__ import annotations

import abc
import math
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar, cast

from anytron.workers.executor.bootstrap import Bootstrap
from anytron.workers.executor.environment import threads_asked_for
from anytron.workers.executor.pending import PendingCall, wait_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.workers.executor.group import RankGroup
    from anytron.workers.executor.protocol import GroupSpec, Host, Pending


class BaseExecutor(abc.ABC):
    """An :class:`~anytron.workers.executor.protocol.Executor` that keeps the groups it started.

    Args:
        config: The run's configuration.
        session: The driver's plugins; they give each process its environment.
    """

    on_this_machine: ClassVar[bool]
    host: Host

    def __init__(self, config: RunConfig, session: Session) -> None:
        self._config = config
        self._session = session
        self._groups: list[RankGroup[Any]] = []

    @abc.abstractmethod
    def start(self, spec: GroupSpec) -> RankGroup[Any]:
        """Start one process per rank; see the protocol."""

    def wait(self, calls: Sequence[Pending], timeout_s: float = math.inf) -> list[Pending]:
        """Wait until one of several calls is done; see the protocol."""
        started = cast("Sequence[PendingCall[Any]]", calls)
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while left_s >= 0.0 and not any(call.done for call in started):
            wait_once(started, left_s)
            left_s = deadline - time.monotonic()
        return [call for call in calls if call.done]

    def end(self) -> None:
        """End every process without a word to its engine; others may be started afterwards."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.end()

    def close(self) -> None:
        """Close every engine and end every process.

        Raises:
            WorkerError: An engine failed to close; every process has ended nevertheless.
        """
        try:
            for group in self._groups:
                group.close()
        finally:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self.close()
            return
        # The run has failed: ranks may wait for each other in collectives, where no engine can close.
        self._leave()

    def _bootstrap(
        self, spec: GroupSpec, rank: int, *, here: Sequence[int], init_method: str, processors: int
    ) -> Bootstrap:
        """Make what a worker is told.

        Args:
            spec: Its group.
            rank: Its rank.
            here: The group's ranks on its machine, itself among them.
            init_method: Where the ranks meet.
            processors: Those of its machine.
        """
        return Bootstrap(
            role=spec.role,
            rank=rank,
            local_rank=here.index(rank),
            world_size=spec.world_size,
            local_world_size=len(here),
            replica=spec.replica,
            init_method=init_method,
            num_threads=spec.num_threads or threads_asked_for() or max(1, processors // (len(here) * spec.replicas)),
            platform=self._session.platform.name,
            config=(spec.config or self._config).model_dump(mode="json"),
            engine_group=spec.engine_group,
            engine_name=spec.engine_name,
            sys_path=list(sys.path),
            python=self._config.rollout.python if spec.role == "rollout" else None,
            model=spec.model,
        )

    def _leave(self) -> None:
        """End every process, and give back what the executor holds."""
        self.end()
