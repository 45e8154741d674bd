"""The interfaces of executors, which start a run's worker processes and call their engines.

Implementations are found by entry point (group ``anytron.executors``; the value is a class that is
constructed with ``(config, session)``). Every implementation promises:

* A worker bootstraps before it unpickles anything: it reads plain data, sets its environment, loads plugins, applies
  the ``before_import`` patches and builds the engine. Only then does it unpickle the arguments of the first call.
* A rank that raises, exits, is killed, gives no sign of life, waits for ever in a collective or does not answer in
  time ends its whole group promptly. The call that was waiting raises, and so does every later one: a broken group
  cannot be used again. A failure while no call is waiting is reported by the next call.
* When the driver itself dies, its workers end themselves.
* SIGTERM, which schedulers send to every process of a job, does not end a worker; the driver ends its workers.

:func:`submit`, :func:`call`, :func:`submit_each` and :func:`scatter` take a method of an engine's protocol instead of a
name, so that mypy finds unknown methods and wrong arguments, and knows the type of the results::

    call(group, TrainingEngine.score, micro_batches, "policy")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from typing_extensions import ParamSpec, Self, TypeVar, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Concatenate

    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import Role
    from anytron.device.platform import Platform
    from anytron.workers.executor.channel import Model


Answer = TypeVar("Answer", covariant=True, default=Any)  # noqa: PLC0105 - a word, as in the signatures that use it
Given = TypeVar("Given")
Share = tuple[Sequence[int], Given]
"""Some ranks of a group, and the arguments that they get."""


@dataclass(frozen=True)
class Host:
    """A machine of a run.

    Attributes:
        id: Identifier of the machine, the same for all of its processes.
        address: Address at which the run's other machines reach it.
    """

    id: str
    address: str


@dataclass(frozen=True)
class GroupSpec:
    """The processes of one engine, one per rank, before they are started.

    Attributes:
        role: Role of the processes, by which plugins choose environment variables and patches.
        engine_group: Entry-point group of the engine, for example ``anytron.training_engines``.
        engine_name: Name of the engine in that group.
        world_size: Number of processes.
        num_threads: CPU threads of each process; None = the driver's ``OMP_NUM_THREADS``, or if that is not set, an
            equal share of the machine's CPUs for each rank of each replica.
        replica: Number of this group, from 0, among the groups of its role and engine.
        replicas: Number of the groups of this role and engine, which work at the same time.
        model: The model that the ranks belong to. To plugins, ranks of a reward model are training ranks. They share
            the devices of the policy's ranks, which are at least as many and start first.
        config: Configuration with which their engine is built; None = the run's configuration.
    """

    role: Role
    engine_group: str
    engine_name: str
    world_size: int
    num_threads: int | None = None
    replica: int = 0
    replicas: int = 1
    model: Model = "policy"
    config: RunConfig | None = None


class Pending(Protocol[Answer]):
    """A call whose answers may not have arrived yet."""

    @property
    def done(self) -> bool:
        """Whether :meth:`result` returns or raises at once. Only ``result`` and ``Executor.wait`` receive answers."""

    def result(self) -> Sequence[Answer]:
        """Wait until the call is over; may be called more than once.

        Returns:
            The result of each rank, in rank order.

        Raises:
            ProcessLost: A rank died (``what`` holds its exit code or signal, ``why`` the last lines it wrote), gave no
                sign of life for ``executor.heartbeat_timeout_s``, waited for ``executor.stall_timeout_s`` in a
                collective that other ranks never join (the error names the collective and the line of code), or did
                not answer within ``executor.call_timeout_s`` (the error shows where the rank stands).
            WorkerError: A rank raised (``why`` holds its traceback), or was not started in time. If the rank raised an
                ``AnytronError``, that error is raised instead, with the ``WorkerError`` as its cause.
        """


class WorkerGroup(Protocol):
    """The processes of one engine, one per rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def hosts(self) -> Sequence[Host]:
        """The machine of each rank."""

    @property
    def ended(self) -> bool:
        """Whether the processes have ended: a call failed, or the executor was closed."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method of the engine on all ranks, with the same arguments, without waiting for the answers.

        The arguments are serialised once. Tensors are sent by value, on the host. If the engines are still being built,
        the call is made once they are ready, while the caller waits. A group can have only one call in progress.

        Raises:
            RuntimeError: An earlier call is still in progress.
            WorkerError: The processes have ended.
        """

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of the engine on all ranks and wait: :meth:`submit`, then :meth:`Pending.result`."""

    def submit_each(self, method: str, shares: Iterable[Share[tuple[Any, ...]]]) -> Pending:
        """Call a method of the engine on all ranks as :meth:`submit` does, with different positional arguments.

        The arguments of a share are serialised once, however many ranks get them, and sent before the next share is
        taken from the iterable.

        Args:
            method: Name of the method.
            shares: Pairs of ranks and the arguments that these ranks get; every rank occurs once.
        """

    def scatter(self, method: str, shares: Iterable[Share[tuple[Any, ...]]]) -> list[Any]:
        """Call a method of the engine on all ranks and wait: :meth:`submit_each`, then :meth:`Pending.result`."""

    def end(self) -> None:
        """End the processes without notifying their engines."""

    def rebuild(self, config: RunConfig) -> None:
        """Close the engine of each rank and build one with another configuration in the same processes.

        Environment, plugins, platform, patches and the number of ranks do not change.

        Args:
            config: The new configuration, with the same number of ranks.

        Raises:
            ProcessLost, WorkerError: As :meth:`Pending.result` does; an engine that cannot be built ends the group.
        """


class Executor(Protocol):
    """Starts the processes of engines and ends all of them. A context manager: leaving closes the executor.

    Attributes:
        on_this_machine: Whether all ranks run on this machine, so that a configuration is checked against this
            machine's devices before an executor is made. An executor that uses other machines checks their devices in
            its constructor.
    """

    on_this_machine: ClassVar[bool]

    @property
    def host(self) -> Host:
        """The machine of the driver."""

    def warm_up(self, specs: Iterable[GroupSpec]) -> None:
        """Start the processes of groups for which :meth:`start` will be called, if this executor can.

        The processes import their engines while the caller prepares data, and build nothing. A group whose processes
        wait already is not warmed up again. Processes of a group that is never started end with the executor.

        Args:
            specs: Descriptions of the groups. :meth:`start` uses waiting processes only for an equal description.

        Raises:
            ConfigError: No such engine is installed.
            WorkerError: A process could not be started.
        """

    def start(self, spec: GroupSpec) -> WorkerGroup:
        """Start one process per rank, each with one engine.

        Returns without waiting for the engines, so that several groups start at the same time; a
        start that fails, or takes longer than ``executor.start_timeout_s``, is reported by the
        group's first call.

        Args:
            spec: Description of the processes.

        Raises:
            ConfigError: No such engine is installed.
            WorkerError: A process could not be started.
        """

    def require_replicas(self, count: int) -> None:
        """Check that there is a device for each of ``count`` replicas, if replicas do not share devices with training.

        Raises:
            ConfigError: There are too few devices.
        """

    def wait(self, calls: Sequence[Pending], timeout_s: float = math.inf) -> list[Pending]:
        """Wait until one of several calls of this executor's groups has returned or failed.

        Args:
            calls: One or more calls.
            timeout_s: Longest time to wait, in seconds.

        Returns:
            The calls that are done, in the given order; empty if no call is done when the time is over.
        """

    def end(self) -> None:
        """End every process without notifying its engine, whatever its state; new ones may be started afterwards."""

    def close(self) -> None:
        """Close every engine and end every process; may be called more than once."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


@runtime_checkable
class ExaminedExecutor(Protocol):
    """The class of an executor whose dependencies ``anytron doctor`` can examine."""

    @classmethod
    def examine(cls, config: RunConfig | None, platform: Platform) -> Iterable[Result]:
        """Examine what the executor depends on, and start nothing. Called in a separate process, which ends afterwards.

        Args:
            config: Configuration of a run, which may use another executor; None = no run in particular.
            platform: The active platform.

        Returns:
            Entries of the doctor's topic ``executors``.
        """


Returned = TypeVar("Returned")
Arguments = ParamSpec("Arguments")
Each = TypeVarTuple("Each")


def submit(
    group: WorkerGroup,
    method: Callable[Concatenate[Any, Arguments], Returned],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Pending[Returned]:
    """Call a method on all ranks with the same arguments; see :meth:`WorkerGroup.submit`."""
    return group.submit(method.__name__, *args, **kwargs)


def call(
    group: WorkerGroup,
    method: Callable[Concatenate[Any, Arguments], Returned],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> list[Returned]:
    """Call a method on all ranks with the same arguments, and wait; see :meth:`WorkerGroup.call`."""
    return group.call(method.__name__, *args, **kwargs)


def submit_each(
    group: WorkerGroup, method: Callable[[Any, Unpack[Each]], Returned], shares: Iterable[Share[tuple[Unpack[Each]]]]
) -> Pending[Returned]:
    """Call a method on all ranks with different arguments; see :meth:`WorkerGroup.submit_each`."""
    return group.submit_each(method.__name__, shares)


def scatter(
    group: WorkerGroup, method: Callable[[Any, Unpack[Each]], Returned], shares: Iterable[Share[tuple[Unpack[Each]]]]
) -> list[Returned]:
    """Call a method on all ranks with different arguments, and wait; see :meth:`WorkerGroup.scatter`."""
    return group.scatter(method.__name__, shares)
