"""The driver's side of the processes of one engine in a Ray cluster."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from anytron.base.errors import ProcessLost
from anytron.workers.executor.group import RankGroup
from anytron.workers.executor.process import tail

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.running import ExecutorSection
    from anytron.workers.executor.channel import Message
    from anytron.workers.executor.heartbeat import Standing
    from anytron.workers.executor.protocol import Host
    from anytron_ray.cluster import Agents
    from anytron_ray.lease import Renewal

INLINE_BYTES = 100_000
"""Smaller arguments travel in Ray's call itself (Ray's ``max_direct_call_object_size``)."""
ASK_S = 10.0
"""Seconds that an agent may take to answer a question about its worker."""


class RayRank:
    """A :class:`~anytron.workers.executor.pending.Rank` whose process an agent has started, somewhere in the cluster.

    Args:
        name: Role and rank, for messages.
        address: Address of the process's machine.
        log: File that holds all that the process writes, on its machine.
        agent: Ray's handle of the agent.

    Attributes:
        answer: Ray's reference to the next answer of the process; the first answer reports that the engine is built.
    """

    def __init__(self, name: str, address: str, log: Path, agent: Any) -> None:
        self.name = name
        self.where = f"{log} on {address}"
        self.answer = agent.exchange.remote(None)
        self._address = address
        self._log = log
        self._agent = agent
        self._lost = ""
        self._question: Any = None

    def send(self, message: Message) -> None:
        """Send a message, or Ray's reference to one. If the process does not read it, :meth:`receive` returns None."""
        self.answer = self._agent.exchange.remote(message)

    def receive(self) -> Message | None:
        """Receive the answer; None if the process is silent, or the process, its agent or its machine is gone."""
        try:
            answer: Message | None = ray.get(self.answer)
        except RayError as error:
            self._lost = str(error)
            return None
        return answer

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process ends; return whether it has."""
        ended: bool = self._ask(True, "wait", timeout_s, timeout_s=timeout_s)
        return ended

    def write_stacks(self) -> None:
        """Ask the process to write the stacks of its threads to its log."""
        self._ask(None, "write_stacks")

    def standing(self) -> Standing | None:
        """Return the process's state as of the last request, and request it anew, without waiting; None if unknown."""
        standing: Standing | None = None
        if self._question is not None:
            ready, _ = ray.wait([self._question], timeout=0.0)
            with contextlib.suppress(RayError):  # what became of it is found where its answer is awaited
                standing = ray.get(self._question) if ready else None
        self._question = self._agent.standing.remote()
        return standing

    def fate(self) -> str:
        """Return how the process, or its agent, ended, and on which machine."""
        fate: str | None = self._ask(None, "fate")
        return f"{fate or 'its Ray agent is gone'} (machine {self._address})"

    def log_tail(self) -> str:
        """Return the last lines that the process wrote; if its agent is gone, those that are found, and Ray's error."""
        lines: str | None = self._ask(None, "log_tail")
        if lines is None:  # the log may lie on a file system that machines share
            written = tail(self._log) if self._log.exists() else ""
            return f"{written}\nRay says: {self._lost}".lstrip()
        return lines

    def new_store(self, *, shared: bool) -> str:
        """Make a store for the rendezvous of torch.distributed on the process's machine; return its ``init_method``.

        Args:
            shared: Whether other machines must be able to reach the store.

        Raises:
            ProcessLost: The agent is gone.
        """
        try:
            made: str = ray.get(self._agent.new_store.remote(self._address if shared else None), timeout=ASK_S)
        except RayError as error:
            raise ProcessLost(
                f"The Ray agent of {self.name} could not open the store for torch.distributed's rendezvous.",
                where=self.where,
                why=str(error),
                fix="check with `ray status` that the machine of this process is in the cluster",
            ) from error
        return made

    def _ask(self, otherwise: Any, method: str, *args: Any, timeout_s: float = 0.0) -> Any:
        try:
            return ray.get(getattr(self._agent, method).remote(*args), timeout=timeout_s + ASK_S)
        except RayError as error:
            self._lost = str(error)
            return otherwise


class RayWorkerGroup(RankGroup[RayRank]):
    """A worker group whose processes are on the machines of a Ray cluster.

    Args:
        engine: Name of the engine, for messages.
        ranks: Ranks in order, just started.
        agents: Agents of the ranks, which end with the group.
        renewal: Renews the leases of the agents on other machines; stopped when the group ends.
        settings: Section ``executor`` of the configuration, for its time limits.
    """

    def __init__(
        self, engine: str, ranks: list[RayRank], agents: Agents, renewal: Renewal, settings: ExecutorSection
    ) -> None:
        super().__init__(engine, ranks, settings)
        self._agents = agents
        self._renewal = renewal

    @property
    def hosts(self) -> Sequence[Host]:
        """The machine of each rank."""
        return [place.host for place in self._agents.places]

    @staticmethod
    def answered(ranks: Sequence[RayRank], timeout_s: float) -> Sequence[RayRank]:
        """Wait until a rank has an answer, has ended or is silent; return all ranks for which this is so."""
        awaited = {rank.answer: rank for rank in ranks}
        ready, others = ray.wait(list(awaited), timeout=timeout_s)
        if ready and others:  # one by one, the answers of N ranks would take N squared looks
            ready += ray.wait(others, num_returns=len(others), timeout=0.0)[0]
        return [awaited[answer] for answer in ready]

    def _carried(self, message: Message, receivers: int) -> Any:
        """Put a large message for several ranks into Ray's store once; each rank gets the reference to it."""
        return message if receivers == 1 or len(message) < INLINE_BYTES else ray.put(message)

    def _new_store(self) -> str:
        return self._ranks[0].new_store(shared=self._agents.machines > 1)

    def _end_all(self) -> None:
        try:
            self._agents.release()
        finally:
            self._renewal.stop()  # not before: an end may take as long as a short lease
