"""The executor ``ray``: every training rank takes a device of a Ray cluster, on any machine."""

from __future__ import annotations

import logging
import os
import socket
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from anytron.base.components import find_component
from anytron.base.errors import AnytronError, ConfigError, WorkerError
from anytron.base.results import Result, of_error, worst
from anytron.workers.executor.base import (
    BaseExecutor,
    interface_variables,
    ranks_beside,
    with_devices,
    worker_environment,
)
from anytron_ray.findings import described, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anytron.base.results import Status
    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.device.platform import Platform
    from anytron.workers.executor.channel import Bootstrap
    from anytron.workers.executor.protocol import GroupSpec
    from anytron_ray.agent import Place
    from anytron_ray.cluster import Agents
    from anytron_ray.group import RayRank, RayWorkerGroup

logger = logging.getLogger(__name__)

NAME = "ray"
PASSED_ON = (
    "ANYTRON_",
    "GLOO_",
    "HF_HOME",
    "HF_HUB_",
    "LANG",
    "LC_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "TMPDIR",
    "TORCH",
    "TRANSFORMERS_",
)
"""Prefixes of the names of the driver's environment variables that all workers receive."""
RUNNING = Path("ray", "ray_current_cluster")
"""File with the address of the running cluster, below Ray's temporary directory (``ray/_private/utils.py``)."""
REACHED_S = 5.0
"""Seconds within which the cluster's head node must accept a connection."""
PLACED_S = 60.0
"""Seconds within which the agents that examine the machines must have started."""
KEPT = "RAY_EXPERIMENTAL_NOSET_"
"""Prefix of the variables that tell Ray not to restrict the devices that its workers see."""


def passed_on(variables: Mapping[str, str], platform: Platform, further: Sequence[str]) -> dict[str, str]:
    """Choose the driver's environment variables that workers receive.

    Args:
        variables: Environment variables of the driver.
        platform: Platform, which names the variables of its device's libraries.
        further: Further names, from ``executor.pass_variables``.
    """
    prefixes = (*PASSED_ON, *platform.environment_prefixes)
    return {name: value for name, value in variables.items() if name.startswith(prefixes) or name in further}


class RayExecutor(BaseExecutor):
    """An :class:`~anytron.workers.executor.protocol.Executor` of processes on the machines of a Ray cluster.

    An agent, an actor of Ray, starts the worker process of each rank on its machine and passes messages on. Agents
    of training ranks take one device and one CPU each. Other agents take none: they run on the machine of the training
    ranks with which they share devices (:func:`~anytron.workers.executor.base.ranks_beside`). Each rank of a reward
    model shares the device of the training rank with the same number. With ``rollout.placement=separate`` each replica
    takes its own device, on any machine.

    The output of a worker is written to ``<trainer.output_dir>/logs/<role>-<rank>.log`` on its machine.

    Args:
        config: The run's configuration.
        session: The driver's plugins; they give each process its environment.

    Raises:
        ConfigError: Ray is not installed, connecting to its cluster failed, or the cluster has too few devices.
    """

    on_this_machine: ClassVar[bool] = False

    @classmethod
    def examine(cls, config: RunConfig | None, platform: Platform) -> Iterator[Result]:
        """Report the installed Ray, whether a cluster runs, its resources for the run, and each machine's report."""
        used = config is not None and config.executor.kind == NAME
        if find_spec("ray") is None:
            fix = "pip install 'anytron[ray]', on every machine"
            yield Result("executors.ray.version", "failed" if used else "skipped", "Ray is not installed", fix)
            return
        yield from _examined(config if used else None, platform)

    def __init__(self, config: RunConfig, session: Session) -> None:
        super().__init__(config, session)
        if find_spec("ray") is None:
            raise ConfigError(
                "The executor ray needs Ray, which is not installed.",
                where="executor.kind",
                fix="pip install 'anytron[ray]', on every machine",
            )
        from anytron_ray import cluster

        self._resource = session.platform.ray_resource
        self._apart = config.rollout.placement == "separate"
        self._trainers: Agents | None = None
        self._disconnects = cluster.connect()
        self.host = cluster.this_host()
        try:
            self.require_replicas(config.rollout.replicas)
        except ConfigError:
            self._leave()
            raise

    def require_replicas(self, count: int) -> None:
        """Check that the cluster has CPUs and devices, free or in use, for the training ranks and ``count`` replicas.

        Raises:
            ConfigError: The cluster has too few CPUs or devices.
        """
        from anytron_ray import cluster

        cluster.require(self._config.parallel.world_size, count if self._apart else 0, self._resource)

    def start(self, spec: GroupSpec) -> RayWorkerGroup:
        """Start one process per rank. Waits until Ray has placed them.

        Raises:
            ConfigError: No such engine is installed, the platform restricts the processes to other devices than Ray has
                assigned, something is missing on machines, or they do not reach each other.
            ProcessLost: The machine of a training rank, on which a rollout process or a reward model must run, is gone.
            WorkerError: Ray did not place the ranks in time, or a process could not be started.
        """
        from anytron_ray import cluster
        from anytron_ray.group import RayWorkerGroup
        from anytron_ray.lease import Renewal

        find_component(spec.engine_group, spec.engine_name, "engine")
        timeout_s = self._config.executor.start_timeout_s
        trainers = self._trainers
        if spec.model == "reward_model":
            assert trainers is not None, "training ranks are started first"
            wanted = [(rank, trainers.places[rank].devices) for rank in range(spec.world_size)]
            agents = cluster.place_beside(trainers, wanted, timeout_s)
        elif spec.role == "trainer":
            agents = self._trainers = cluster.place_ranks(spec.world_size, self._resource, timeout_s)
        elif self._apart:
            agents = cluster.place_ranks(spec.world_size, self._resource, timeout_s)
        else:
            assert trainers is not None, "training ranks are started first"
            first = ranks_beside(spec.replica, spec.replicas, len(trainers.places))[0]
            wanted = [(first, tuple(trainers.devices_at(first)))] * spec.world_size
            agents = cluster.place_beside(trainers, wanted, timeout_s)
        placed = zip(agents.actors, agents.places, strict=True)
        renewal = Renewal([actor for actor, place in placed if place.host.id != self.host.id])
        try:
            self._introduce(agents)
            ranks = self._start_processes(agents, spec)
        except BaseException:  # Ctrl-C too: nothing else knows these agents yet
            agents.release()
            renewal.stop()
            raise
        group = RayWorkerGroup(spec.engine_name, ranks, agents, renewal, self._config.executor)
        self._groups.append(group)
        return group

    def _introduce(self, agents: Agents) -> None:
        """Check the machines of the agents, except those that were already checked for the training ranks.

        Raises:
            ConfigError: Something is missing on machines, or they do not reach each other.
            ProcessLost: A machine is gone.
            ResourceError: The driver's disk is full.
        """
        from anytron_ray import machines

        trainers = self._trainers
        assert trainers is not None, "training ranks are started first"
        members = machines.one_of_each(agents.actors, agents.places)
        if agents is not trainers:
            known = {place.host.id for place in trainers.places}
            if {place.host.id for place in agents.places} <= known:
                return
            first = machines.Member(trainers.actors[0], trainers.places[0])
            members = [first, *(one for one in members if one.place.host.id not in known)]
        _, found = machines.examine(members, self._config)
        require(found)
        for finding in found:
            logger.warning("%s %s: %s", finding.machine, finding.what, finding.fix)

    def _start_processes(self, agents: Agents, spec: GroupSpec) -> list[RayRank]:
        import ray
        from ray.exceptions import RayError

        from anytron_ray.group import RayRank

        settings = self._config.executor
        logs = Path(self._config.trainer.output_dir).resolve() / "logs"
        shared = agents.places[0].host.address if agents.machines > 1 else None
        bootstraps: list[Bootstrap] = []
        ranks: list[RayRank] = []
        try:
            init_method = ray.get(agents.actors[0].new_store.remote(shared), timeout=settings.start_timeout_s)
            starting = []
            for rank, (actor, place) in enumerate(zip(agents.actors, agents.places, strict=True)):
                here, processors = agents.ranks_at(rank), place.processors
                bootstrap = self._bootstrap(spec, rank, here=here, processors=processors)
                environment = self._environment(bootstrap, place, agents.devices_at(rank))
                if spec.role == "rollout" and not self._apart:
                    environment = self._beside(environment, spec)
                log = logs / bootstrap.log
                way = None if place.host.id == self.host.id else (place.host.address, self.host.address)
                arguments = (bootstrap, environment, init_method, log, settings.heartbeat_timeout_s, way)
                starting.append(actor.start.remote(*arguments))
                bootstraps.append(bootstrap)
            ray.get(starting, timeout=settings.start_timeout_s)
            for bootstrap, actor, place in zip(bootstraps, agents.actors, agents.places, strict=True):
                ranks.append(RayRank(bootstrap.name, place.host.address, logs / bootstrap.log, actor))
        except RayError as error:
            raise WorkerError(
                f"The {spec.role} processes could not be started.",
                where="executor.kind=ray",
                why=str(error),
                fix="check the machines with `ray status`, and read the logs in Ray's directory there",
            ) from error
        return ranks

    def _environment(self, bootstrap: Bootstrap, place: Place, devices: list[str]) -> dict[str, str]:
        """Join the variables with which Ray was started on a rank's machine with those of the driver that a run needs.

        Library paths and network interfaces are the machine's. A rank sees all devices that Ray has assigned to its
        group on the machine, and uses the one whose index is its local rank. Other variables of the driver, such as
        tokens of other services, are not passed on.
        """
        platform = self._session.platform
        variable = platform.visible_devices_variable
        given = {variable: ",".join(devices)} if variable is not None and devices else {}
        machine = {name: value for name, value in place.environment.items() if name != variable}
        alone = bootstrap.local_world_size == bootstrap.world_size
        inherited = interface_variables(platform, place.loopback if alone else place.interface)
        inherited |= passed_on(os.environ, platform, self._config.executor.pass_variables) | machine | given
        environment = worker_environment(inherited, bootstrap, self._session.hooks)
        for name, ids in given.items():
            if environment[name] != ids:
                raise ConfigError(
                    f"{name}={environment[name]} conflicts with devices {ids}, which Ray assigned on "
                    f"{place.host.address}.",
                    where="platform.options",
                    why=f"the platform {bootstrap.platform} sets {name}",
                    fix="remove the platform option that restricts devices: with executor.kind=ray, Ray assigns them",
                )
        return environment

    def _beside(self, environment: dict[str, str], spec: GroupSpec) -> dict[str, str]:
        """Let a colocated replica see only the devices that it shares, not all devices of training ranks there."""
        variable, trainers = self._session.platform.visible_devices_variable, self._trainers
        if variable is None or trainers is None:
            return environment
        ranks = ranks_beside(spec.replica, spec.replicas, len(trainers.places))
        here = trainers.ranks_at(ranks[0])
        return with_devices(environment, variable, [here.index(rank) for rank in ranks if rank in here])

    def _leave(self) -> None:
        super()._leave()
        if self._disconnects:
            import ray

            self._disconnects = False
            ray.shutdown()


def _examined(config: RunConfig | None, platform: Platform) -> Iterator[Result]:
    """Report on the cluster that runs, if any; none is started. For a run, agents examine the machines, and then end.

    Args:
        config: A run on Ray; None = no run in particular.
        platform: Names the Ray resource that stands for its devices.
    """
    yield Result("executors.ray.version", "passed", version("ray"))
    counted = platform.ray_resource
    what = "CPU" if counted is None else f"unit of the resource {counted}"
    yield Result("executors.ray.devices", "passed", f"each training rank takes one {what}")
    kept = sorted(name for name in os.environ if name.startswith(KEPT))
    if kept:
        detail = f"{', '.join(kept)}: Ray hides no devices from its workers; a rank uses the device that Ray assigns"
        yield Result("executors.ray.visibility", "passed", detail)
    named = os.environ.get("RAY_ADDRESS")
    place = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / RUNNING  # noqa: S108 - Ray's own default
    if not named and not place.is_file():
        detail = "RAY_ADDRESS is not set and no cluster runs here: a run starts one of this machine alone"
        yield Result("executors.ray.cluster", "passed", detail)
        return
    yield from _joined(named or place.read_text(encoding="utf-8").strip(), config, platform)


def _joined(address: str, config: RunConfig | None, platform: Platform) -> Iterator[Result]:
    import ray

    from anytron_ray import cluster

    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray itself waits for a minute
            socket.create_connection((host, int(port)), REACHED_S).close()
        ray.init(address=address, log_to_driver=False)
    except Exception as error:  # noqa: BLE001 - Ray says in a dozen classes that it did not work
        fix = "check with `ray status` that the cluster is running, and install the versions of Ray and Python with "
        fix += "which it was started; if it no longer runs: ray stop"
        status: Status = "warning" if config is None else "failed"
        yield Result("executors.ray.cluster", status, f"{address} cannot be joined: {error}", fix)
        return
    try:
        total = {name: count for name, count in ray.cluster_resources().items() if ":" not in name}
        nodes = sum(node["Alive"] for node in ray.nodes())
        has = ", ".join(f"{count:g} {name}" for name, count in sorted(total.items()) if "memory" not in name)
        yield Result("executors.ray.cluster", "passed", f"{address}: {nodes} machines, {has}")
        if config is not None:
            apart = config.rollout.replicas if config.rollout.placement == "separate" else 0
            cluster.require(config.parallel.world_size, apart, platform.ray_resource)
            yield Result("executors.ray.room", "passed", f"enough for {config.parallel.world_size + apart} processes")
            yield from _introduced(config, platform)
    except ConfigError as error:
        yield of_error("executors.ray.room", error)
    finally:
        ray.shutdown()


def _introduced(config: RunConfig, platform: Platform) -> Iterator[Result]:
    """Let the machines that can have ranks introduce themselves, as before a start; yield an entry for each."""
    from anytron_ray import cluster, machines

    try:
        agents = cluster.place_on_each(platform.ray_resource, PLACED_S)
        try:
            said, found = machines.examine(machines.one_of_each(agents.actors, agents.places), config)
        finally:
            agents.release()
    except AnytronError as error:
        yield of_error("executors.ray.machines", error)
        return
    for machine in said:
        wrong = [finding for finding in found if finding.machine == machine.name]
        status = worst(["passed", *("failed" if finding.fatal else "warning" for finding in wrong)])
        detail = "; ".join([described(machine), *(finding.what for finding in wrong)])
        yield Result(f"executors.ray.{machine.address}", status, detail, "; ".join(finding.fix for finding in wrong))
