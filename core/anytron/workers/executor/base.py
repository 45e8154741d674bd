"""Common parts of executors whose workers are processes: their start, environment variables and end."""

from __future__ import annotations

import abc
import contextlib
import fcntl
import math
import os
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar, cast

from anytron.base.components import find_component
from anytron.base.errors import ConfigError
from anytron.config.schema import RunConfig
from anytron.workers.executor.channel import Bootstrap
from anytron.workers.executor.pending import PendingCall, wait_once

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from anytron.device.hooks.facade import Hooks
    from anytron.device.loading import Session
    from anytron.device.platform import Platform
    from anytron.workers.executor.group import RankGroup
    from anytron.workers.executor.protocol import GroupSpec, Host, Pending

SPIN_COUNT = "30000"
"""Value of ``GOMP_SPINCOUNT``, unless the user sets it: how long GNU OpenMP's threads spin while they wait for work.

It is a tenth of OpenMP's default. Ranks and the rollout process take turns on the same processors: with the default,
the threads of a process that has just finished spin for milliseconds on the cores that the next process needs (12% of
a step of examples/grpo_sort.yaml).
"""
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Thresholds in bytes at which glibc takes memory from the system and gives it back, unless the user sets them.

glibc itself raises both thresholds, at most to these values, once larger blocks have been freed. Until then each update
takes all memory for its activations from the system anew; on CPUs, zeroing the pages takes a tenth of its time.
"""
_GET_FLAGS, _GET_ADDRESS, _LOOPBACK = 0x8913, 0x8915, 0x8
"""``SIOCGIFFLAGS``, ``SIOCGIFADDR`` and ``IFF_LOOPBACK`` of Linux's net/if.h."""


class BaseExecutor(abc.ABC):
    """An :class:`~anytron.workers.executor.protocol.Executor` that keeps the groups it started.

    Args:
        config: The run's configuration.
        session: The driver's plugins, which set environment variables of each process.
    """

    on_this_machine: ClassVar[bool]
    host: Host

    def __init__(self, config: RunConfig, session: Session) -> None:
        self._config = config
        self._session = session
        self._groups: list[RankGroup[Any]] = []

    def warm_up(self, specs: Iterable[GroupSpec]) -> None:
        """Check that the engines are installed; :meth:`start` starts the processes.

        Raises:
            ConfigError: An engine is not installed.
        """
        for spec in specs:
            find_component(spec.engine_group, spec.engine_name, "engine")

    @abc.abstractmethod
    def start(self, spec: GroupSpec) -> RankGroup[Any]:
        """Start one process per rank."""

    def wait(self, calls: Sequence[Pending], timeout_s: float = math.inf) -> list[Pending]:
        """Wait until one of several calls is done, or the time is over; return the calls that are done."""
        started = cast("Sequence[PendingCall[Any]]", calls)
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while left_s >= 0.0 and not any(call.done for call in started):
            wait_once(started, left_s)
            left_s = deadline - time.monotonic()
        return [call for call in calls if call.done]

    def end(self) -> None:
        """End every process without notifying its engine; new ones may be started afterwards."""
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

    def _bootstrap(self, spec: GroupSpec, rank: int, *, here: Sequence[int], processors: int) -> Bootstrap:
        """Make a worker's first message.

        Args:
            spec: Group of the worker.
            rank: Rank of the worker.
            here: Ranks of the group on the worker's machine, ``rank`` included, in order.
            processors: Number of CPUs of the worker's machine.
        """
        return Bootstrap(
            role=spec.role,
            rank=rank,
            local_rank=here.index(rank),
            world_size=spec.world_size,
            local_world_size=len(here),
            replica=spec.replica,
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
        """End every process, and release the executor's resources."""
        self.end()


def loopback_interface() -> str | None:
    """Name of this machine's loopback interface, mostly ``lo``; None if there is none."""
    return next((name for name, (flags,) in _interfaces(_GET_FLAGS, "H") if flags & _LOOPBACK), None)


def interface_of(address: str) -> str | None:
    """Name of this machine's interface whose first IPv4 address is ``address``; None if there is none."""
    return next(
        (name for name, found in _interfaces(_GET_ADDRESS, "4x4s") if socket.inet_ntoa(*found) == address), None
    )


def _interfaces(question: int, form: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Ask the kernel about each network interface; yield its name and the answer, if there is an answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s16x", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                yield name, struct.unpack_from(form, fcntl.ioctl(probe, question, request), 16)


def interface_variables(platform: Platform, interface: str | None) -> dict[str, str]:
    """Return environment variables that make collectives listen on one network interface alone.

    Without them, gloo takes the interface of the address to which the machine's name resolves. If all ranks are on one
    machine, other machines may reach that interface. If ranks are on several machines, gloo may take the loopback
    interface (a name that resolves to 127.0.1.1), which no other machine reaches.

    Args:
        platform: The platform, which names the variables for the device's own collectives.
        interface: If all ranks are on one machine, its :func:`loopback_interface`; otherwise the interface of the
            machine's address (:func:`interface_of`). None = return no variables.
    """
    names = ("GLOO_SOCKET_IFNAME", *platform.socket_interface_variables)
    return {} if interface is None else dict.fromkeys(names, interface)


def threads_asked_for() -> int | None:
    """Read the number of threads of a process from the driver's ``OMP_NUM_THREADS``; None if it is not set.

    The variable may be a list, whose later numbers are for nested parallel regions (OpenMP 5.2, section 21.2).

    Raises:
        ConfigError: The variable is not a positive number.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    first = said.split(",")[0].strip()
    if said and not (first.isdecimal() and int(first)):
        raise ConfigError(
            "OMP_NUM_THREADS is not a positive number.",
            where="environment variables",
            why=f"it is {said!r}, but it must say how many threads each process uses",
            fix="set OMP_NUM_THREADS to a positive number, or unset it",
        )
    return int(first) if said else None


def worker_environment(inherited: Mapping[str, str], bootstrap: Bootstrap, hooks: Hooks) -> dict[str, str]:
    """Return the environment variables of a worker process.

    Args:
        inherited: Environment variables of the driver, or of the worker's machine.
        bootstrap: Bootstrap message of the worker.
        hooks: The driver's plugins, which add variables.
    """
    return {
        "GOMP_SPINCOUNT": SPIN_COUNT,
        **KEPT_MEMORY,
        **inherited,
        **hooks.runtime_env(bootstrap.process, RunConfig.model_validate(bootstrap.config)),
        "OMP_NUM_THREADS": str(bootstrap.num_threads),
        "PYTHONUNBUFFERED": "1",  # a process that is killed leaves all it wrote in its log
    }


def with_devices(environment: Mapping[str, str], variable: str, indices: Sequence[int]) -> dict[str, str]:
    """Return an environment in which a process sees only some of its devices.

    Args:
        environment: Environment variables of the process.
        variable: Environment variable that restricts the visible devices.
        indices: Indices of these devices among those that ``environment`` shows.
    """
    visible = environment.get(variable)
    ids = visible.split(",") if visible else None
    return {**environment, variable: ",".join(str(one) if ids is None else ids[one] for one in indices)}


def ranks_beside(replica: int, replicas: int, ranks: int) -> range:
    """Choose the training ranks whose devices a colocated replica uses: neighbouring ranks, different for each replica.

    If there are more replicas than ranks, some replicas share a device.
    """
    first, end = replica * ranks // replicas, (replica + 1) * ranks // replicas
    return range(first, max(end, first + 1))
