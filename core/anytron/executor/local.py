"""The executor ``local``: every rank is a process on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.components import require_component
from anytron.errors import WorkerError
from anytron.executor.address import ADDRESS, free_port
from anytron.executor.bootstrap import Bootstrap
from anytron.executor.group import LocalWorkerGroup
from anytron.executor.process import WorkerProcess, end_all
from anytron.hooks.types import ProcessInfo

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from anytron.config.schema import RunConfig
    from anytron.hooks.types import Role
    from anytron.plugins import Session

SPIN_COUNT = "30000"
"""How long GNU OpenMP's threads spin for new work, unless the user says: a tenth of its default.

Ranks and the rollout process take turns on the same processors: with the default, the threads of the one that
has just finished spin for milliseconds on the cores of the next (12% of a step of examples/grpo_sort.yaml).
"""


class LocalExecutor:
    """An :class:`~anytron.executor.protocol.Executor` of processes on this machine.

    What a worker writes goes to ``<trainer.output_dir>/logs/<role>-<rank>.log``.

    Args:
        config: The run's configuration.
        session: The driver's plugins; they give each process its environment.
    """

    def __init__(self, config: RunConfig, session: Session) -> None:
        self._config = config
        self._session = session
        self._groups: list[LocalWorkerGroup] = []

    def start(
        self, role: Role, engine_group: str, engine_name: str, world_size: int, num_threads: int | None = None
    ) -> LocalWorkerGroup:
        """Start one process per rank; see the protocol."""
        require_component(engine_group, engine_name, "engine")
        logs = Path(self._config.trainer.output_dir).resolve() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        settings = self._config.executor
        threads = num_threads or max(1, len(os.sched_getaffinity(0)) // world_size)
        port = free_port()
        processes: list[WorkerProcess] = []
        try:
            for rank in range(world_size):
                bootstrap = Bootstrap(
                    role=role,
                    rank=rank,
                    local_rank=rank,
                    world_size=world_size,
                    master_address=ADDRESS,
                    master_port=port,
                    num_threads=threads,
                    platform=self._session.platform.name,
                    platform_options=self._config.platform.options,
                    config=self._config.model_dump(mode="json"),
                    engine_group=engine_group,
                    engine_name=engine_name,
                    sys_path=list(sys.path),
                )
                log = logs / f"{role}-{rank}.log"
                processes.append(WorkerProcess(bootstrap, self._environment(bootstrap), log, settings.call_timeout_s))
        except BaseException as error:  # Ctrl-C too: nothing else knows these processes yet
            end_all(processes)
            if isinstance(error, OSError):
                raise WorkerError(f"{role} rank {len(processes)} could not be started", why=str(error)) from error
            raise
        group = LocalWorkerGroup(
            engine_name,
            processes,
            start_timeout_s=settings.start_timeout_s,
            call_timeout_s=settings.call_timeout_s,
        )
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Close every engine and end every process.

        Raises:
            WorkerError: An engine failed to close; every process has ended nevertheless.
        """
        groups, self._groups = self._groups, []
        try:
            for group in groups:
                group.close()
        finally:
            for group in groups:
                group.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The run has failed: ranks may wait for each other in collectives, where no engine can close.
        for group in self._groups:
            group.end()

    def _environment(self, bootstrap: Bootstrap) -> dict[str, str]:
        process = ProcessInfo(
            role=bootstrap.role,
            rank=bootstrap.rank,
            local_rank=bootstrap.local_rank,
            world_size=bootstrap.world_size,
        )
        return {
            "GOMP_SPINCOUNT": SPIN_COUNT,
            **os.environ,
            **self._session.hooks.runtime_env(process),
            "OMP_NUM_THREADS": str(bootstrap.num_threads),
            "PYTHONUNBUFFERED": "1",  # a process that is killed leaves all it wrote in its log
        }
