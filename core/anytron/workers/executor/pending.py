"""Calls that are in progress on a group of ranks, and the interfaces of such a group and of its ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from anytron.base.errors import WorkerError
    from anytron.workers.executor.channel import Message
    from anytron.workers.executor.heartbeat import Standing

POLL_S = 1.0
"""Seconds between checks for processes that are silent, or have ended while a child keeps their channel open."""


class Rank(Protocol):
    """A worker process, on this machine or another one."""

    @property
    def name(self) -> str:
        """Display name: role and rank."""

    @property
    def where(self) -> str:
        """The place of the process's log, for messages."""

    def send(self, message: Message) -> None:
        """Send a message, unless the process has ended.

        Raises:
            BlockingIOError: The process does not read its messages.
        """

    def receive(self) -> Message | None:
        """Receive the answer; None if the process ended without an answer, or sends no heartbeats."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""

    def write_stacks(self) -> None:
        """Ask the process, if it still runs, to write the stacks of its threads to its log."""

    def standing(self) -> Standing | None:
        """Return the state that the previous call of this method asked for, and ask for the present state.

        None = no call has asked for a state yet, or the process has not answered.
        """

    def fate(self) -> str:
        """Return how the process ended, or what is wrong if it still runs."""

    def log_tail(self) -> str:
        """The last lines that the process wrote; empty if there are none."""


AnyRank = TypeVar("AnyRank", bound=Rank)


@dataclass(frozen=True)
class Awaited(Generic[AnyRank]):
    """The ranks for which a call waits.

    Attributes:
        ranks: The ranks that have not answered.
        deadline: Time by which they must answer, on the clock of :func:`time.monotonic`.
    """

    ranks: Sequence[AnyRank]
    deadline: float


class CallingGroup(Protocol[AnyRank]):
    """The methods of a group of workers that a call in progress uses."""

    @property
    def ended(self) -> bool:
        """Whether the processes have ended."""

    def end(self) -> None:
        """End the processes."""

    def no_call(self, method: str) -> WorkerError:
        """Return the error that a call raises when the processes have ended."""

    @staticmethod
    def answered(ranks: Sequence[AnyRank], timeout_s: float) -> Sequence[AnyRank]:
        """Wait at most ``timeout_s`` seconds for a rank to answer, end or become silent; return all that have."""


class PendingCall(Generic[AnyRank]):
    """A call in progress on a group of ranks: a :class:`~anytron.workers.executor.protocol.Pending`.

    Args:
        method: Name of the method.
        steps: Generator that makes the call: it yields the ranks for which it waits, receives those that are ready,
            perhaps none, and returns the results.
        group: Group of the ranks. A call that fails or is interrupted ends the group.

    Attributes:
        group: Group of the ranks.
        awaited: The ranks for which the call waits.
    """

    awaited: Awaited[AnyRank]

    def __init__(
        self,
        method: str,
        steps: Generator[Awaited[AnyRank], Sequence[AnyRank], list[Any]],
        group: CallingGroup[AnyRank],
    ) -> None:
        self.group = group
        self._method, self._steps = method, steps
        self._results: list[Any] | None = None
        self._error: Exception | None = None
        self._go_on(lambda: next(steps))

    @property
    def done(self) -> bool:
        """Whether :meth:`result` returns or raises at once."""
        return self._results is not None or self._error is not None or self.group.ended

    def result(self) -> list[Any]:
        """Wait for the results of all ranks, and return them in the order of the ranks."""
        while not self.done:
            wait_once([self], POLL_S)
        if self._error is not None:
            raise self._error
        if self._results is None:
            raise self.group.no_call(self._method)
        return self._results

    def take(self, ready: Sequence[AnyRank]) -> None:
        """Process the answers of the awaited ranks that are ready; if there are none, check the deadline."""
        self._go_on(lambda: self._steps.send(ready))

    def _go_on(self, step: Callable[[], Awaited[AnyRank]]) -> None:
        try:
            self.awaited = step()
        except StopIteration as end:
            self._results = end.value
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
            self.group.end()
        except BaseException:
            self.group.end()  # answers are outstanding, so the channels are out of step
            raise


def wait_once(calls: Sequence[PendingCall[AnyRank]], timeout_s: float) -> None:
    """Wait until there is an answer for one of several calls that are not done, and pass each call its answers.

    Args:
        calls: One or more calls, all on groups of the same class.
        timeout_s: Longest time to wait, in seconds; :data:`POLL_S` is never exceeded.
    """
    now = time.monotonic()
    left_s = min([timeout_s, POLL_S, *(call.awaited.deadline - now for call in calls)])
    ranks = [rank for call in calls for rank in call.awaited.ranks]
    try:
        ready = set(calls[0].group.answered(ranks, max(0.0, left_s)))
    except BaseException:  # Ctrl-C too: nobody will take the answers
        for call in calls:
            call.group.end()
        raise
    for call in calls:
        call.take([rank for rank in call.awaited.ranks if rank in ready])
