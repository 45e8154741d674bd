"""Find ranks that wait in collectives that can never end. A rank is reported only if this is certain.

A rank is held if it has begun a collective that is not over, and another rank of the collective's group has not begun
it and never will, because that rank has answered the call or is itself held in another collective. The held ranks are
the largest set with this property. If all ranks of a group begin its collectives in the same order, a healthy run has
no held ranks: the rank that is furthest behind has begun no collective that others have not begun, so that neither it
nor the ranks that wait for it are held. It may compile, write a file or sleep for any time.

The notes of several ranks are not taken at the same time. So only ranks count whose position and collectives have not
changed for all of ``executor.stall_timeout_s``. A note arrives late on a busy machine. So this time is measured between
two equal notes, by the rank's own clock, and of a rank that has answered, only notes after its answer count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from anytron.workers.executor.pending import AnyRank

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from anytron.workers.executor.heartbeat import Collective, Standing

LOOKS = 6
"""Number of times that ranks are checked within ``executor.stall_timeout_s``."""
LOOK_S = 5.0
"""Longest time between two checks, in seconds. One check requests a note and the next one reads it; a note older than
twice this time is discarded."""
SHOWN = 8
"""Largest number of ranks, and of places where ranks wait, that a message names."""


@dataclass(frozen=True)
class Held:
    """The collective that holds a rank.

    Attributes:
        collective: The collective in which the rank waits.
        missing: Ranks that never join it.
    """

    collective: Collective
    missing: tuple[int, ...]


def held_ranks(standings: Sequence[Standing | None], answered: AbstractSet[int]) -> dict[int, Held]:
    """Find the ranks that wait for ever.

    Args:
        standings: State of each rank; None = the rank makes progress, or its state is unknown.
        answered: Ranks that have answered the call.
    """
    held: dict[int, Held] = {}
    candidates = {number for number, one in enumerate(standings) if one and one.waits} - set(answered)
    while candidates:
        gone = candidates | answered
        held = {number: holds for number in candidates if (holds := _holds(standings, number, gone)) is not None}
        if len(held) == len(candidates):
            return held
        candidates = set(held)
    return {}


def _holds(standings: Sequence[Standing | None], number: int, gone: AbstractSet[int]) -> Held | None:
    standing = standings[number]
    assert standing is not None, "it has a collective"
    for collective in standing.waits:
        members = standing.groups.get(collective.group, [])
        others = [one for one in members if one in gone and one != number]
        missing = [one for one in others if _never_joins(standings[one], collective, members)]
        if missing:
            return Held(collective, tuple(missing))
    return None


def _never_joins(standing: Standing | None, collective: Collective, members: list[int]) -> bool:
    """Whether a rank that begins no more collectives has not begun this one, or has begun another one in its place."""
    if standing is None or standing.groups.get(collective.group) != members:
        return False
    if any(
        one.sequence == collective.sequence and one.number == collective.number and one.call != collective.call
        for one in standing.waits
    ):
        return True
    begun = standing.begun.get(collective.sequence, 0 if standing.complete else collective.number)
    return begun < collective.number


class StallWatch(Generic[AnyRank]):
    """Watches the ranks of one call.

    Args:
        ranks: All ranks of the group.
        timeout_s: Seconds without progress after which a rank may count as held.
        answer: Number of the answer that this call awaits of each rank, from 1.
    """

    def __init__(self, ranks: Sequence[AnyRank], timeout_s: float, answer: int) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._answer = answer
        self._next = time.monotonic() + min(timeout_s / LOOKS, LOOK_S)
        self._seen: list[Standing | None] = [None] * len(ranks)
        self._since = [0.0] * len(ranks)

    def look(self, answered: AbstractSet[int]) -> dict[int, Held]:
        """Check the ranks if a check is due.

        Args:
            answered: Ranks that have answered the call.

        Returns:
            The ranks that wait for ever; empty unless that is certain.
        """
        now = time.monotonic()
        if len(self._ranks) == 1 or now < self._next:
            return {}
        self._next = now + min(self._timeout_s / LOOKS, LOOK_S)
        for number, rank in enumerate(self._ranks):
            standing = rank.standing()
            if standing is not None and standing != self._seen[number]:
                self._since[number] = standing.moment
            self._seen[number] = standing
        return held_ranks([self._settled(number, number in answered) for number in range(len(self._ranks))], answered)

    def _settled(self, number: int, has_answered: bool) -> Standing | None:
        """Return the state in which a rank stays; None if it moves, or its note is older than its answer."""
        standing = self._seen[number]
        if standing is None or standing.moment - self._since[number] < self._timeout_s:
            return None
        return None if has_answered and standing.answers < self._answer else standing

    def describe(self, held: Mapping[int, Held], method: str) -> str:
        """Describe, for each rank concerned, where it waits or what it does instead.

        Args:
            held: Held ranks from :meth:`look`.
            method: Name of the method that was called.
        """
        alike: dict[tuple[Held, int], list[int]] = {}
        for number, holds in sorted(held.items()):
            alike.setdefault((holds, self._of(number).place), []).append(number)
        parts = [self._waiting(holds, numbers) for (holds, _), numbers in list(alike.items())[:SHOWN]]
        missing = {one for holds in held.values() for one in holds.missing} - set(held)
        answered = [self._ranks[number].name for number in sorted(missing)[:SHOWN]]
        return "\n".join(
            [*parts, *(f"{name} has answered {method}() and begins no more collectives" for name in answered)]
        )

    def _waiting(self, holds: Held, numbers: Sequence[int]) -> str:
        one, standing = holds.collective, self._of(numbers[0])
        joined = {number: self._of(number).begun.get(one.sequence, 0) for number in holds.missing}
        others = ", ".join(
            f"{self._ranks[number].name} (which has begun {begun} collectives of this group)"
            for number, begun in list(joined.items())[:SHOWN]
        )
        place = "\n".join(f"    {frame}" for frame in standing.frames)
        members = ", ".join(map(str, standing.groups[one.group][: 2 * SHOWN]))
        return (
            f"{names(self._ranks, numbers)} in {one.call} ({one.library}) with inputs {one.shapes or '-'}, collective "
            f"{one.number} of group {one.group} ({standing.descriptions.get(one.group)}; ranks {members}), without "
            f"{others}:\n{place}"
        )

    def _of(self, number: int) -> Standing:
        standing = self._seen[number]
        assert standing is not None, "ranks of which nothing is known are not concerned"
        return standing


def names(ranks: Sequence[AnyRank], numbers: Collection[int]) -> str:
    """List the names of the ranks with these numbers, for a message; of many, only the first."""
    shown = ", ".join(ranks[number].name for number in sorted(numbers)[:SHOWN])
    return f"{shown} and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else shown
