"""The lease of an agent on another machine than the driver's: the driver renews it, and it runs out if that is cut off.

Ray ends the agents of a driver that has ended, but it may take minutes to notice that a machine is cut off, and cannot
end what it does not reach. So an agent whose lease runs out ends its worker and itself. On the driver's own machine
there are no leases: nothing can come between.

Importing this module imports no ray: an agent imports it, whose process has ray already.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from anytron.workers.executor.heartbeat import BEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class Lease:
    """The agent's side: a thread that waits for renewals.

    It counts the seconds that it has waited itself, not those that a clock shows. After the whole machine stood still,
    renewals that have arrived meanwhile count.

    Args:
        limit_s: Seconds without a renewal after which the lease has run out.
        run_out: Called then, in the thread.
    """

    def __init__(self, limit_s: float, run_out: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._run_out = run_out
        self._renewed = threading.Event()
        threading.Thread(target=self._wait, name="anytron-lease", daemon=True).start()

    def renew(self) -> None:
        """Begin to count anew."""
        self._renewed.set()

    def _wait(self) -> None:
        waited_s = 0.0
        while waited_s < self._limit_s:
            waited_s = 0.0 if self._renewed.wait(BEAT_S) else waited_s + BEAT_S
            self._renewed.clear()
        self._run_out()


class Renewal:
    """The driver's side: a thread that renews the leases of agents, also while user code keeps the main thread busy.

    No renewal is sent to an agent before the last one has arrived, or failed.

    Args:
        agents: Ray's handles of the agents; none if all are on the driver's machine.
    """

    def __init__(self, agents: Sequence[Any]) -> None:
        self._agents = agents
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="anytron-leases", daemon=True)
        if agents:
            self._thread.start()

    def stop(self) -> None:
        """Renew no more, so that what is left of the agents ends itself. Returns when the thread has ended."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _renew(self) -> None:
        import ray
        from ray.exceptions import RayError

        due, sent = list(self._agents), dict[Any, Any]()
        while True:
            try:
                while due:
                    sent[due[-1].renew.remote()] = due[-1]
                    due.pop()
                arrived = ray.wait(list(sent), num_returns=len(sent), timeout=0.0)[0]
                due = [sent.pop(answer) for answer in arrived]
                for answer in arrived:
                    with contextlib.suppress(RayError):  # what became of the agent is found where its worker is awaited
                        ray.get(answer)
            except RayError as error:
                logger.warning("a sign of life for agents on other machines could not be sent: %s", error)
            if self._over.wait(BEAT_S):
                return
