"""A worker process, on this machine or another, as its group sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from anytron.workers.executor.channel import Message
    from anytron.workers.executor.standing import Standing


class Rank(Protocol):
    """A worker process, here or elsewhere."""

    @property
    def name(self) -> str:
        """For people: role and rank."""

    @property
    def where(self) -> str:
        """For people: the log that holds all that the process writes."""

    def send(self, message: Message) -> None:
        """Send a message; one that is gone gets none.

        Raises:
            BlockingIOError: The process does not read.
        """

    def receive(self) -> Message | None:
        """Take the answer; None if the process ended without one, or is silent."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it came."""

    def write_stacks(self) -> None:
        """Ask the process, if it still runs, to write the stacks of its threads to its log."""

    def standing(self) -> Standing | None:
        """Say where the process stood when this was last asked, and ask anew; None if it is not known."""

    def fate(self) -> str:
        """Say how the process ended, or what is wrong with one that still runs."""

    def log_tail(self) -> str:
        """The last lines that the process wrote; empty if there are none."""


AnyRank = TypeVar("AnyRank", bound=Rank)
