"""The position of a call, in memory that the driver and an isolated process share.

A message for each step would cost more than most steps. The driver reads only when a call is late or the process has
ended. The process cannot harm the driver by what it writes: impossible numbers are ignored, and the memory cannot be
shrunk, because reading beyond its end would kill the driver.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
from time import monotonic

_RECORD = struct.Struct("dq")
_NOWHERE = -1


class Progress:
    """The position of a call, and the time of the last report.

    Args:
        descriptor: Descriptor of the memory from :meth:`made`; it stays open.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _RECORD.size)

    @staticmethod
    def made() -> int:
        """Make the shared memory, and return its descriptor, which can be passed to a child."""
        descriptor = os.memfd_create("anytron-progress", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _RECORD.size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor

    def begin(self) -> None:
        """Report that a call begins now."""
        self._note(_NOWHERE)

    def at(self, position: int) -> None:
        """Report that the call has reached this position now."""
        self._note(position)

    @property
    def since(self) -> float:
        """Time of the last report, on the clock of :func:`time.monotonic`, which all processes share.

        A time in the future, or one that is not a number, counts as infinitely long ago, like no report.
        """
        noted = float(_RECORD.unpack_from(self._memory)[0])
        return noted if noted <= monotonic() else -math.inf

    def position(self, steps: int) -> int | None:
        """Return the position of a call that has ``steps`` positions; None if it has not reached the first one."""
        position = int(_RECORD.unpack_from(self._memory)[1])
        return position if 0 <= position < steps else None

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def _note(self, position: int) -> None:
        _RECORD.pack_into(self._memory, 0, monotonic(), position)
