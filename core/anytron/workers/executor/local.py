"""The executor ``local``: every rank is a process on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from anytron.base.components import find_component
from anytron.base.errors import ConfigError
from anytron.workers.executor.address import Stores
from anytron.workers.executor.base import (
    BaseExecutor,
    interface_variables,
    loopback_interface,
    ranks_beside,
    with_devices,
    worker_environment,
)
from anytron.workers.executor.group import RankGroup
from anytron.workers.executor.process import WorkerProcess, answered, end_all
from anytron.workers.executor.protocol import Host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.config.running import ExecutorSection
    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.workers.executor.protocol import GroupSpec

THIS_MACHINE = Host("", "127.0.0.1")


class LocalWorkerGroup(RankGroup[WorkerProcess]):
    """A group of workers whose ranks are processes on this machine.

    Args:
        engine: Name of the engine, for messages.
        ranks: Ranks in order, just started.
        stores: Stores through which the ranks form their process groups; closed with the group.
        settings: The time limits.
    """

    def __init__(self, engine: str, ranks: list[WorkerProcess], stores: Stores, settings: ExecutorSection) -> None:
        super().__init__(engine, ranks, settings)
        self._stores = stores

    @property
    def hosts(self) -> Sequence[Host]:
        """This machine, for each rank."""
        return [THIS_MACHINE] * self.size

    @staticmethod
    def answered(ranks: Sequence[WorkerProcess], timeout_s: float) -> Sequence[WorkerProcess]:
        """Wait at most ``timeout_s`` seconds for a rank to answer, end or become silent; return all that have."""
        return answered(ranks, timeout_s)

    def _new_store(self) -> str:
        return self._stores.new()

    def _end_all(self) -> None:
        end_all(self._ranks)
        self._stores.close()


class LocalExecutor(BaseExecutor):
    """An :class:`~anytron.workers.executor.protocol.Executor` of processes on this machine.

    The output of a worker is appended to a file in ``<trainer.output_dir>/logs``: ``<role>-<rank>.log`` for the first
    replica, ``<role>-<replica>-<rank>.log`` for the others, and ``reward_model-<rank>.log`` for a reward model. Nothing
    listens on an address that other machines reach: ranks form their process groups through a
    :class:`~anytron.workers.executor.address.Stores`, and collectives use the loopback interface.
    """

    on_this_machine: ClassVar[bool] = True
    host = THIS_MACHINE

    def __init__(self, config: RunConfig, session: Session) -> None:
        super().__init__(config, session)
        self._warm: list[tuple[GroupSpec, list[WorkerProcess]]] = []

    def warm_up(self, specs: Iterable[GroupSpec]) -> None:
        """Start the processes of groups, which import their engines and wait for :meth:`start`."""
        for spec in specs:
            if self._warm_place(spec) is None:
                self._warm.append((spec, self._launch(spec, None)))

    def start(self, spec: GroupSpec) -> LocalWorkerGroup:
        """Start one process per rank."""
        logs = Path(self._config.trainer.output_dir).resolve() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        stores, processes = Stores(), list[WorkerProcess]()
        try:
            init_method = stores.new()
            place = self._warm_place(spec)
            processes = self._launch(spec, logs) if place is None else self._warm.pop(place)[1]
            for process in processes:
                process.build(init_method, logs / process.log_name)
        except BaseException:  # Ctrl-C too: nothing else knows these processes
            end_all(processes)
            stores.close()
            raise
        group = LocalWorkerGroup(spec.engine_name, processes, stores, self._config.executor)
        self._groups.append(group)
        return group

    def require_replicas(self, count: int) -> None:
        """Check that this machine has a device for each replica; see :meth:`Executor.require_replicas`.

        Raises:
            ConfigError: There are too few devices.
        """
        ranks, devices = self._config.parallel.world_size, self._session.probe.devices
        if self._config.rollout.placement == "separate" and ranks + count > devices:
            raise ConfigError(
                "There are too few devices for the replicas.",
                where=f"rollout.replicas = {count}",
                why=f"{ranks} training rank{'' if ranks == 1 else 's'} and {count} replicas need one device each, "
                f"and the platform {self._session.platform.name} has {devices}",
                fix=f"set the number of replicas to at most {devices - ranks}",
            )

    def end(self) -> None:
        """End every process, also those of groups that were warmed up and never started."""
        warm, self._warm = self._warm, []
        for _, processes in warm:
            end_all(processes)
        super().end()

    def _warm_place(self, spec: GroupSpec) -> int | None:
        return next((place for place, (warm, _) in enumerate(self._warm) if warm == spec), None)

    def _launch(self, spec: GroupSpec, logs: Path | None) -> list[WorkerProcess]:
        """Start the processes of a group, without their engines; their output goes to ``logs``, or into memory."""
        find_component(spec.engine_group, spec.engine_name, "engine")
        inherited = {**interface_variables(self._session.platform, loopback_interface()), **os.environ}
        ranks, processors = range(spec.world_size), len(os.sched_getaffinity(0))
        processes: list[WorkerProcess] = []
        try:
            for rank in ranks:
                bootstrap = self._bootstrap(spec, rank, here=ranks, processors=processors)
                environment = worker_environment(inherited, bootstrap, self._session.hooks)
                if spec.role == "rollout":
                    environment = self._with_devices(environment, spec)
                log = None if logs is None else logs / bootstrap.log
                timeout_s = self._config.executor.heartbeat_timeout_s
                processes.append(WorkerProcess(bootstrap, environment, log, timeout_s))
        except BaseException:  # Ctrl-C too: nothing else knows these processes yet
            end_all(processes)
            raise
        return processes

    def _with_devices(self, environment: dict[str, str], spec: GroupSpec) -> dict[str, str]:
        """Show a replica only its own devices (training rank i has device i); a single colocated replica sees all."""
        variable, ranks = self._session.platform.visible_devices_variable, self._config.parallel.world_size
        if self._config.rollout.placement == "separate":
            assert variable is not None, "a platform without one is refused before"
            return with_devices(environment, variable, [ranks + spec.replica])
        if variable is None or spec.replicas == 1:
            return environment
        return with_devices(environment, variable, ranks_beside(spec.replica, spec.replicas, ranks))
