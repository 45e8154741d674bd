"""The agent: a Ray actor on the machine of a rank that starts the worker process there and forwards messages.

Only functions of this module import ray, which the agent's process has loaded already.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from anytron.base.errors import WorkerError
from anytron.workers.executor.address import Stores
from anytron.workers.executor.base import interface_of, loopback_interface
from anytron.workers.executor.process import SECOND_LOOK_S, WorkerProcess, answered, end_all
from anytron.workers.executor.protocol import Host
from anytron_ray.introduction import Doorstep, introduce, obstacles
from anytron_ray.lease import Lease

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from anytron.workers.executor.channel import Bootstrap, Message
    from anytron.workers.executor.heartbeat import Standing
    from anytron_ray.introduction import Introduction, Question

POLL_S = 1.0
"""Seconds between two checks whether the worker is silent, or has ended while a child of it keeps its channel open."""
LAST_WORDS_S = 5.0
"""Seconds for writing the last error to the log, whose file system may be on a machine that is no longer reached."""


@dataclass(frozen=True)
class Place:
    """The machine of an agent, and its resources there.

    Attributes:
        host: The machine, by Ray's id and its address in the cluster.
        processors: Number of CPUs that processes there may use.
        devices: Ids of the devices that Ray has assigned to the agent; empty if Ray only counts devices. An agent
            without resources in Ray has devices of training ranks: for a rollout process, of all ranks on its machine;
            for a rank of a reward model, of the training rank with the same number.
        environment: Environment variables with which Ray was started there, without ``RAY_...``.
        loopback: Name of the machine's loopback interface; None if none was found.
        interface: Name of the network interface with the machine's address in the cluster. None if no interface has it
            (an IPv6 address, an alias); then gloo chooses one.
    """

    host: Host
    processors: int
    devices: tuple[str, ...]
    environment: dict[str, str]
    loopback: str | None
    interface: str | None


class Agent:
    """A Ray actor with several threads: while one waits for the worker's answer, others can watch or end the worker.

    The agent holds one end of the channel to the worker, so that the worker dies when the driver or the agent dies.
    """

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._lease: Lease | None = None
        self._stores = Stores()
        self._doorstep = Doorstep()

    def place(self, resource: str | None) -> Place:
        """Return the place of this agent, with its devices of Ray's resource ``resource``; None = no devices."""
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return Place(
            host=Host(context.get_node_id(), address),
            processors=len(os.sched_getaffinity(0)),
            devices=() if resource is None else tuple(context.get_accelerator_ids().get(resource, ())),
            # Ray's own variables say which of its processes this one is; the worker is not a process of Ray.
            environment={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            loopback=loopback_interface(),
            interface=interface_of(address),
        )

    def clock(self) -> float:
        """Return the time of the machine's clock, in seconds since the epoch."""
        return time.time()

    def introduce(self, question: Question) -> Introduction:
        """Answer a question about the machine (:func:`~anytron_ray.introduction.introduce`)."""
        return introduce(question, self._doorstep)

    def obstacles(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """Connect to addresses and ports of other machines; return for each why it failed, empty if it succeeded."""
        return obstacles(places)

    def hush(self) -> None:
        """Stop listening for connections of other machines."""
        self._doorstep.close()

    def new_store(self, address: str | None) -> str:
        """Make an empty store for the rendezvous of torch.distributed; return its ``init_method``.

        Args:
            address: Address of this machine, for ranks on several machines; None = all ranks are on this one.

        Raises:
            WorkerError: This machine does not have the address.
            ResourceError: The process has run out of file descriptors.
        """
        return self._stores.new(address)

    def start(
        self,
        bootstrap: Bootstrap,
        environment: Mapping[str, str],
        init_method: str,
        log: Path,
        heartbeat_timeout_s: float,
        way: tuple[str, str] | None,
    ) -> None:
        """Start the worker process.

        Args:
            bootstrap: Bootstrap message of the worker.
            environment: Environment of the process.
            init_method: ``init_method`` of torch.distributed with which the ranks find each other.
            log: File to which the output of the process is appended.
            heartbeat_timeout_s: Seconds without a sign of life after which the worker counts as lost. The driver counts
                as lost :data:`SECOND_LOOK_S` later.
            way: Address of this machine and address of the driver's machine, from which the driver must then send signs
                of life (:meth:`renew`); None = the driver is on this machine, and sends none.

        Raises:
            OSError: The directory of the log cannot be made.
            WorkerError: The process cannot be started.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = WorkerProcess(bootstrap, environment, log, heartbeat_timeout_s)
        self._process.build(init_method, log)
        if way is not None:
            limit_s = heartbeat_timeout_s + SECOND_LOOK_S  # as the driver looks for a worker
            self._lease = Lease(limit_s, lambda: self._leave(*way, limit_s))

    def renew(self) -> None:
        """Receive a sign of life from the driver."""
        if self._lease is not None:  # it begins with the worker
            self._lease.renew()

    def exchange(self, message: Message | None) -> Message | None:
        """Send a message, if any, and wait for the answer; None if the worker ended without an answer, or is silent."""
        if message is not None:
            try:
                self._worker.send(message)
            except BlockingIOError:
                return None
        while not answered([self._worker], POLL_S):
            pass
        return self._worker.receive()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the worker ends; return whether it has."""
        return self._worker.wait(timeout_s)

    def write_stacks(self) -> None:
        """Ask the worker to write the stacks of its threads to its log."""
        self._worker.write_stacks()

    def standing(self) -> Standing | None:
        """Return the worker's state as of the last request, and request it anew; None if the state is unknown."""
        return self._worker.standing()

    def fate(self) -> str:
        """Return how the worker ended, or what is wrong with one that still runs."""
        return self._worker.fate()

    def log_tail(self) -> str:
        """The last lines that the worker wrote; empty if there are none."""
        return self._worker.log_tail()

    def end(self) -> None:
        """End the worker. The rendezvous store stays, because other ranks may still need it while they end."""
        if self._process is not None:
            end_all([self._process])

    def _leave(self, here: str, driver: str, limit_s: float) -> NoReturn:
        """End the worker and this process, because the driver is no longer heard. The worker's log says so."""
        worker = self._worker
        worker.signal(signal.SIGKILL)
        error = WorkerError(
            f"The agent of {worker.name} no longer hears the driver, and has ended {worker.name} and itself.",
            where=f"machine {here}, process {worker.pid}",
            why=f"no sign of life came from the driver's machine {driver} for {limit_s:g} s: this machine was cut off, "
            "or the driver was stopped",
            fix="check the network between the two machines; if the driver was stopped, or was blocked in a library "
            "that holds Python's lock (the GIL), raise executor.heartbeat_timeout_s",
        )
        # Ray keeps a log of its own for this process, which is never on a shared file system.
        sys.stderr.write(f"{error}\n")
        writing = threading.Thread(target=worker.note, args=(str(error),), daemon=True)
        writing.start()
        writing.join(LAST_WORDS_S)
        os._exit(1)

    @property
    def _worker(self) -> WorkerProcess:
        assert self._process is not None
        return self._process
