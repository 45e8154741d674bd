"""The lease of an agent on another machine than the driver's: it runs out when the driver no longer renews it.

Ray ends the agents of a driver that has ended, but it may take minutes to notice that a machine is cut off, and cannot
end an agent that it does not reach. So an agent whose lease runs out ends its worker and itself. On the driver's own
machine there are no leases, because no network lies between driver and agent.

Only functions of this module import ray, which the agent's process has loaded already.
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

    The thread counts the seconds that it has waited, not the time of a clock. So after the whole machine was suspended,
    renewals that have arrived meanwhile are still in time.

    Args:
        limit_s: Seconds without a renewal after which the lease has run out.
        run_out: Called in the thread when the lease has run out.
    """

    def __init__(self, limit_s: float, run_out: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._run_out = run_out
        self._renewed = threading.Event()
        threading.Thread(target=self._wait, name="anytron-lease", daemon=True).start()

    def renew(self) -> None:
        """Restart the count of seconds."""
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
        """Stop renewing, so that agents that still run end themselves. Returns when the thread has ended."""
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
