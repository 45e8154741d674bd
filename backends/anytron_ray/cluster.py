"""Ray's cluster: join or start one, compare its resources with those that a run needs, and place agents in it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from anytron.base.errors import ConfigError, ProcessLost, WorkerError
from anytron.workers.executor.protocol import Host
from anytron_ray.agent import Agent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron_ray.agent import Place

logger = logging.getLogger(__name__)

THREADS = 4
"""Threads of an agent: one awaits the worker's answer; the others write stacks, read the log and end the worker."""
PATIENCE_S = 5.0
"""Seconds that a run waits for free resources of the cluster before it logs that it waits."""
END_S = 10.0
"""Seconds that agents may take to end their workers; then Ray kills the agents, and their workers die with them."""
LOOPBACK = "127.0.0.1"
OPTIONS = {"CPU": "--num-cpus={}", "GPU": "--num-gpus={}"}
"""Options of ``ray start`` by resource; all other resources are given with ``--resources``."""


def connect() -> bool:
    """Join the cluster that ``RAY_ADDRESS`` names or that runs on this machine; start one here if there is none.

    Returns:
        Whether this call made the connection, so that the caller must disconnect.

    Raises:
        ConfigError: A cluster is named or runs here, but connecting to it failed.
    """
    if ray.is_initialized():
        return False
    named = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address="auto", log_to_driver=False)
    except Exception as error:  # Ray says in a dozen classes that it did not work
        if named or not isinstance(error, ConnectionError):
            raise ConfigError(
                "Could not connect to the Ray cluster.",
                where=f"RAY_ADDRESS={named}" if named else "the cluster that runs on this machine",
                why=str(error),
                fix="check with `ray status` that the cluster is running, and install the versions of Ray and Python "
                "with which it was started",
            ) from error
        logger.warning("RAY_ADDRESS is not set and no Ray cluster runs here: starting one on this machine alone")
        start_here()
    return True


def start_here() -> None:
    """Start a cluster of this machine alone, and join it. It listens on the loopback interface only.

    Ray replaces a loopback address by one that other machines reach, unless it knows that there will be no other
    machine.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for Ray's own processes
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, which has read the variable as it imported ray
    ray.init(address="local", log_to_driver=False, include_dashboard=False, _node_ip_address=LOOPBACK)


def this_host() -> Host:
    """The machine of this process, in the form in which agents describe it."""
    return Host(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def require(ranks: int, replicas: int, resource: str | None) -> None:
    """Check that the cluster has a CPU and, if needed, a device for each training rank and each separate replica.

    Args:
        ranks: Number of training ranks.
        replicas: Number of rollout replicas that do not share the devices of training ranks.
        resource: Ray's name for the devices; None = the run needs none.

    Raises:
        ConfigError: The cluster has too few processors or devices.
    """
    total, needed = ray.cluster_resources(), ranks + replicas
    for name in _bundle(resource):
        if total.get(name, 0) < needed:
            option = OPTIONS.get(name, f"--resources='{{{{\"{name}\": {{}}}}}}'").format(needed)
            others = f" and {replicas} rollout replica{'' if replicas == 1 else 's'}" if replicas else ""
            raise ConfigError(
                f"The Ray cluster has too few {name}.",
                where="executor.kind=ray",
                why=f"the run needs {needed} {name} for {ranks} training rank{'' if ranks == 1 else 's'}{others}, but "
                f"the cluster has {total.get(name, 0):g}",
                fix=f"lower a parallel size{' or rollout.replicas' if replicas else ''}, or start the cluster "
                f"with more {name}: ray start --head {option}",
            )


@dataclass(frozen=True)
class Agents:
    """The agents of a worker group in rank order; agents on one machine are adjacent.

    Attributes:
        actors: Ray's handles.
        places: Machine and resources of each agent.
        reservation: The placement group that holds the agents' resources; None = they hold no resources.
    """

    actors: list[Any]
    places: list[Place]
    reservation: Any

    @property
    def machines(self) -> int:
        """Number of machines that the agents are on."""
        return len({place.host for place in self.places})

    def ranks_at(self, rank: int) -> list[int]:
        """The ranks on the same machine as ``rank``, in order."""
        return self._ranks_of[self.places[rank].host]

    @cached_property
    def _ranks_of(self) -> dict[Host, list[int]]:
        ranks: dict[Host, list[int]] = {}
        for rank, place in enumerate(self.places):
            ranks.setdefault(place.host, []).append(rank)
        return ranks

    def devices_at(self, rank: int) -> list[str]:
        """Ids of the devices that Ray has assigned to the ranks on the machine of a rank, in rank order."""
        return [device for other in self.ranks_at(rank) for device in self.places[other].devices]

    def release(self) -> None:
        """End the workers and their agents, and give their resources back."""
        _release(self.actors, self.reservation)


def place_ranks(ranks: int, resource: str | None, timeout_s: float) -> Agents:
    """Place an agent, with one device and one CPU, for each rank, on as few machines as possible.

    It also waits for resources that the cluster does not have yet: a lost machine, or its replacement, may join.

    Raises:
        WorkerError: Devices did not become free in time, or an agent could not be started.
    """
    bundle = _bundle(resource)
    reservation = placement_group([bundle] * ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        if not reservation.wait(min(timeout_s, PATIENCE_S)) and not _waited(reservation, bundle, ranks, timeout_s):
            raise _not_placed(ranks, bundle, timeout_s)  # noqa: TRY301 - what follows is for every error
        for index in range(ranks):
            strategy = PlacementGroupSchedulingStrategy(reservation, placement_group_bundle_index=index)
            actors.append(_actor(strategy, bundle))
        return _arranged(actors, resource, reservation, timeout_s)
    except BaseException:
        _release(actors, reservation)
        raise


def place_beside(trainers: Agents, wanted: Sequence[tuple[int, tuple[str, ...]]], timeout_s: float) -> Agents:
    """Place agents that hold no resources on the machines of training ranks.

    Args:
        trainers: The training ranks' agents.
        wanted: For each agent, a training rank on whose machine it must be, and the ids of the devices that it gets.
            Agents of one machine are adjacent.
        timeout_s: Seconds within which the agents must have started.

    Raises:
        ProcessLost: The machine of a training rank is gone.
        WorkerError: The agents could not be started.
    """
    alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
    for rank, _ in wanted:
        if (node := trainers.places[rank].host.id) not in alive:
            raise ProcessLost(
                f"No process can be started on the machine of training rank {rank}: the machine is gone.",
                where="executor.kind=ray",
                why=f"Ray reports node {node} as dead",
                fix="restart Ray on that machine, or let another machine join the cluster (`ray status` lists them)",
            )
    nodes = [trainers.places[rank].host.id for rank, _ in wanted]
    actors = [_actor(NodeAffinitySchedulingStrategy(node, soft=False), {}) for node in nodes]
    try:
        agents = _arranged(actors, None, None, timeout_s)
        given = zip(agents.places, wanted, strict=True)
        return replace(agents, places=[replace(place, devices=devices) for place, (_, devices) in given])
    except BaseException:
        _release(actors, None)
        raise


def place_on_each(resource: str | None, timeout_s: float) -> Agents:
    """Place an agent that holds no resources on each machine that can have a training rank.

    Raises:
        WorkerError: The agents could not be started.
    """
    bundle = _bundle(resource)
    able = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(name, 0) >= count for name, count in bundle.items())
    ]
    actors = [_actor(NodeAffinitySchedulingStrategy(node, soft=False), {}) for node in able]
    try:
        return _arranged(actors, None, None, timeout_s)
    except BaseException:
        _release(actors, None)
        raise


def _bundle(resource: str | None) -> dict[str, float]:
    return {"CPU": 1} if resource is None else {resource: 1, "CPU": 1}


def _not_placed(ranks: int, bundle: dict[str, float], timeout_s: float) -> WorkerError:
    free = ray.available_resources()
    return WorkerError(
        f"Ray did not place {ranks} processes within {timeout_s:g} s.",
        where="executor.start_timeout_s",
        why=f"each needs {', '.join(f'1 {name}' for name in bundle)} on one machine; "
        f"free in the cluster: {', '.join(f'{free.get(name, 0):g} {name}' for name in bundle)}",
        fix="stop other jobs in the cluster (`ray status` shows what is in use), or raise executor.start_timeout_s",
    )


def _waited(reservation: Any, bundle: dict[str, float], ranks: int, timeout_s: float) -> bool:
    """Say that the run waits for room, and wait; return whether there was room in time."""
    logger.warning(
        "waiting up to %g s for room in the Ray cluster for %d processes with %s each: `ray status` shows what is free",
        timeout_s,
        ranks,
        ", ".join(f"1 {name}" for name in bundle),
    )
    found: bool = reservation.wait(max(0.0, timeout_s - PATIENCE_S))
    return found


def _actor(strategy: Any, bundle: dict[str, float]) -> Any:
    others = {name: count for name, count in bundle.items() if name not in OPTIONS}
    options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": others}
    return ray.remote(Agent).options(scheduling_strategy=strategy, max_concurrency=THREADS, **options).remote()


def _arranged(actors: list[Any], resource: str | None, reservation: Any, timeout_s: float) -> Agents:
    try:
        places = ray.get([actor.place.remote(resource) for actor in actors], timeout=timeout_s)
    except RayError as error:
        raise WorkerError(
            "Anytron's agent (a Ray actor) could not be started in the Ray cluster.",
            where="executor.kind=ray",
            why=str(error),
            fix="install Anytron on every machine, in the Python with which Ray was started there",
        ) from error
    hosts = list(dict.fromkeys(place.host for place in places))
    order = sorted(range(len(actors)), key=lambda one: (hosts.index(places[one].host), *_ids(places[one].devices)))
    return Agents([actors[one] for one in order], [places[one] for one in order], reservation)


def _ids(devices: tuple[str, ...]) -> list[tuple[int, str]]:
    # Numeric ids ascend, as some drivers demand; a GPU may also be known by a name.
    return [(int(one), "") if one.isdigit() else (0, one) for one in devices]


def _release(actors: list[Any], reservation: Any) -> None:
    if actors:
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_S)
    for actor in actors:
        ray.kill(actor)
    if reservation is not None:
        remove_placement_group(reservation)
