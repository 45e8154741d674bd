"""How far a call has come, in memory that the driver and an isolated process share.

A message for each step would cost more than most steps. The driver reads only when time is over, or the process gone.
"""

from __future__ import annotations

import mmap
import os
import struct
from time import monotonic

_RECORD = struct.Struct("dq")
_NOWHERE = -1


class Progress:
    """Where a call stands, and since when.

    Args:
        descriptor: Of memory that :meth:`made` has made; stays open.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _RECORD.size)

    @staticmethod
    def made() -> int:
        """Make the memory. Returns its descriptor, which a child can be given."""
        descriptor = os.memfd_create("anytron-progress")
        os.ftruncate(descriptor, _RECORD.size)
        return descriptor

    def begin(self) -> None:
        """Note that a call begins now."""
        self._note(_NOWHERE)

    def at(self, position: int) -> None:
        """Note that the call has come to this position now."""
        self._note(position)

    @property
    def since(self) -> float:
        """When the last note was made, on the clock of :func:`time.monotonic`, which is one for all processes."""
        return float(_RECORD.unpack_from(self._memory)[0])

    @property
    def position(self) -> int | None:
        """Where the call stands; None if it has not come to anything yet."""
        position = int(_RECORD.unpack_from(self._memory)[1])
        return None if position < 0 else position

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def _note(self, position: int) -> None:
        _RECORD.pack_into(self._memory, 0, monotonic(), position)
