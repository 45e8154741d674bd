"""A worker's heartbeat, in memory that it shares with the process that started it.

No message is sent: a process that is stopped, frozen or stuck in a library simply leaves the memory as it is. The
clock is CLOCK_MONOTONIC, one for all processes of a machine, which no change of the date moves.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

BEAT_S = 1.0
"""Time between two beats."""
_FORMAT = struct.Struct("d")


class Heartbeat:
    """When a worker was last alive. It begins to beat once its engine is built; the start has a limit of its own.

    Args:
        descriptor: Of the shared memory; the caller closes it, the memory stays.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _FORMAT.size)

    @property
    def begun(self) -> bool:
        """Whether there was a beat."""
        return self._last() > 0.0

    def beat(self) -> None:
        """Say that this process is alive."""
        _FORMAT.pack_into(self._memory, 0, time.monotonic())

    def silence_s(self) -> float:
        """Seconds since the last beat; 0 before the first."""
        last = self._last()
        return time.monotonic() - last if last > 0.0 else 0.0

    def _last(self) -> float:
        last: float = _FORMAT.unpack_from(self._memory)[0]
        return last


def shared_memory() -> int:
    """Make memory for a heartbeat, without a name that others could open; its descriptor goes to the worker."""
    descriptor = os.memfd_create("anytron-heartbeat")
    os.ftruncate(descriptor, _FORMAT.size)
    return descriptor
