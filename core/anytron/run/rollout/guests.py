"""Askers of the rollout engines besides the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from anytron.run.rollout.pool import RolloutPool


class Guests(Protocol):
    """Askers in another thread, such as the clients of an endpoint."""

    def visit(self, pool: RolloutPool) -> None:
        """Ask the pool what the guests have asked since the last visit, and give up what they have given up."""
