"""Processes that are ranks of one process group on the platform's devices, for rules about several ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any

from anytron.base.results import in_one_line
from anytron.device.hooks.types import ProcessInfo
from anytron.proof.checks import Inapplicable
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings
from anytron.task.isolation.worker import calls, enter
from anytron.workers.executor.address import Stores
from anytron.workers.executor.base import interface_variables, loopback_interface
from anytron_conformance.rules import Broken
from anytron_conformance.worker import open_subject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.device.loading import Session
    from anytron_conformance.subject import Subject

CALL_S = 40.0
START_S = 300.0


def on_ranks(subject: Subject, count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in several processes, each a rank of one process group of the platform's backend.

    The processes are started at the first call and serve all later calls.

    Args:
        subject: The platform.
        count: Number of ranks.
        function: Importable by name; called with a :class:`Member` and the arguments.
        arguments: Arguments of the function, which are pickled.

    Raises:
        Broken: A rank raised ``Broken``.
        Inapplicable: A rank raised ``Inapplicable``, or there are fewer devices than ranks.
        CheckFailed: A rank raised something else, hung or died.
    """
    name = f"{count} ranks"
    ranks = subject.keep(name, lambda: Ranks(subject, count))
    try:
        ranks.call(function, *arguments)
    except (Broken, Inapplicable):
        raise
    except BaseException:  # they could not start, or have not all come back: the next rule gets others
        subject.drop(name)
        raise


def require_devices(session: Session, count: int) -> None:
    """Check that each of the given number of ranks can have its own device.

    Raises:
        Inapplicable: There are fewer devices here.
    """
    platform, devices = session.platform, session.probe.devices
    if platform.accelerator and devices < count:
        raise Inapplicable(f"{count} ranks need {count} devices, and the probe of {platform.name} finds {devices}")


@dataclass(frozen=True)
class Member:
    """Context of a function that is called on every rank.

    Attributes:
        rank: Rank of this process in the default process group.
        size: Number of ranks of that group.
        subject: The platform, in this process; its current device is this rank's.
    """

    rank: int
    size: int
    subject: Subject


class CheckFailed(Exception):  # noqa: N818 - what happened
    """A rank raised an unexpected exception, hangs, or died; the message has details."""


class Ranks:
    """Processes on this machine that are the ranks of one process group; see :func:`on_ranks`.

    Args:
        subject: The platform.
        count: Number of ranks.

    Raises:
        Inapplicable: There are fewer devices.
    """

    def __init__(self, subject: Subject, count: int) -> None:
        require_devices(subject.session, count)
        platform = subject.platform
        self._stores = Stores()
        method = self._stores.new()
        inherited = interface_variables(platform, loopback_interface())
        # What the plugins wanted for this process they may not want for a rank.
        inherited |= {name: value for name, value in os.environ.items() if name not in subject.session.environment}
        self._processes = [
            IsolatedProcess(
                ProcessSettings(
                    title=f"Rank {rank} of {count} of the conformance kit",
                    where=f"platform {platform.name}",
                    worker=__name__,
                    start={
                        "platform": subject.source.platform,
                        "options": dict(subject.source.options),
                        "scratch": str(subject.scratch),
                        "threads": 1,
                        "rank": rank,
                        "size": count,
                        "meet": method,
                        "environment": inherited,
                    },
                    timeout_s=CALL_S,
                    memory_gib=None,
                    start_timeout_s=START_S,
                ),
                subject.scratch / f"rank-{rank}.log",
            )
            for rank in range(count)
        ]

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on all ranks and wait for all of them."""
        for process in self._processes:
            process.send([(function, arguments)])
        answers = self._answers()
        for rank, answer in enumerate(answers):
            if isinstance(answer, Gone) or "raised" in answer:
                why = answer.why if isinstance(answer, Gone) else answer["raised"]
                fate = "hangs: " if isinstance(answer, Gone) and answer.late else ""
                raise CheckFailed(f"rank {rank} of {len(answers)} {fate}{why}")
        for rank, answer in enumerate(answers):
            assert not isinstance(answer, Gone), "that has been raised"
            if "broken" in answer:
                what, difference = answer["broken"]
                raise Broken(what, f"on rank {rank} of {len(answers)}: {difference}")
            if "inapplicable" in answer:
                raise Inapplicable(answer["inapplicable"])

    def _answers(self) -> list[Mapping[str, Any] | Gone]:
        """The answer of each rank; as soon as one raised or is gone, no more answers are awaited."""
        found: dict[int, Mapping[str, Any] | Gone] = {}
        while len(found) < len(self._processes):
            waiting = [process for rank, process in enumerate(self._processes) if rank not in found]
            until = min(process.deadline for process in waiting)
            wait([process.connection for process in waiting], max(0.0, until - monotonic()))
            for rank, process in enumerate(self._processes):
                if rank not in found and (answer := process.receive()) is not None:
                    found[rank] = answer
            if any(isinstance(one, Gone) or "raised" in one for one in found.values()):
                return [found.get(rank, {}) for rank in range(len(self._processes))]
        return [found[rank] for rank in range(len(self._processes))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()
        self._stores.close()


def main(channel: int, lifeline: int) -> None:
    """Run a rank: join the group, then call the functions that the driver sends.

    Arguments as for :func:`anytron.task.isolation.worker.enter`.
    """
    connection, start = enter(channel, lifeline)
    os.environ.update(start["environment"])

    rank, size = start["rank"], start["size"]
    subject = open_subject(start, ProcessInfo("trainer", rank, rank, size))
    subject.runtime.set_device(rank)

    import torch

    torch.distributed.init_process_group(
        subject.runtime.communication_backend, init_method=start["meet"], rank=rank, world_size=size
    )
    member = Member(rank, size, subject)
    for (function, arguments), give in calls(connection, start):
        give(_answer(function, member, arguments))
    os._exit(0)  # process groups that are still referred to would end the interpreter with std::terminate


def _answer(function: Callable[..., None], member: Member, arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        function(member, *arguments)
    except Broken as error:
        return {"broken": [error.what, error.difference]}
    except Inapplicable as error:
        return {"inapplicable": error.reason}
    except Exception as error:  # noqa: BLE001 - a platform's code, whatever it raises
        return {"raised": in_one_line(error)}
    return {}
