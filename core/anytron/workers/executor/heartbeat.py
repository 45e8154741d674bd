"""A worker's heartbeat and its note of where it stands, in memory shared with the process that started it.

No message is sent: a process that is stopped, frozen or stuck in a library simply leaves the memory as it is. The
clock is CLOCK_MONOTONIC, one for all processes of a machine, which no change of the date moves.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib

BEAT_S = 1.0
"""Time between two beats."""
FRESH_S = 10.0
"""Age at which a note is no longer true: the worker writes it within two beats after it was asked."""
_SIZE = 1 << 18
_MOMENT = struct.Struct("d")
_NOTE = struct.Struct("dII")  # when it was written, its length and its checksum; the note follows
_BEAT_AT, _ASKED_AT, _NOTE_AT = 0, 8, 16
_TEXT_AT = _NOTE_AT + _NOTE.size


class Heartbeat:
    """When a worker was last alive. It begins to beat once its engine is built; the start has a limit of its own.

    Args:
        descriptor: Of the shared memory; the caller closes it, the memory stays.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)

    @property
    def begun(self) -> bool:
        """Whether there was a beat."""
        return self._moment(_BEAT_AT) > 0.0

    def beat(self) -> None:
        """Say that this process is alive."""
        _MOMENT.pack_into(self._memory, _BEAT_AT, time.monotonic())

    def silence_s(self) -> float:
        """Seconds since the last beat; 0 before the first."""
        last = self._moment(_BEAT_AT)
        return time.monotonic() - last if last > 0.0 else 0.0

    def ask(self) -> None:
        """Ask the worker for a note."""
        _MOMENT.pack_into(self._memory, _ASKED_AT, time.monotonic())

    @property
    def asked(self) -> bool:
        """Whether a note was asked for since the last one was written."""
        return self._moment(_ASKED_AT) > self._moment(_NOTE_AT)

    def write(self, note: bytes) -> None:
        """Write a note in the place of the last one. One that is longer than the memory is left out."""
        if len(note) > _SIZE - _TEXT_AT:
            note = b""
        self._memory[_TEXT_AT : _TEXT_AT + len(note)] = note
        _NOTE.pack_into(self._memory, _NOTE_AT, time.monotonic(), len(note), zlib.crc32(note))

    def read(self) -> bytes:
        """Read the last note; empty if there is none, it is old, or it is being written."""
        written, length, checksum = _NOTE.unpack_from(self._memory, _NOTE_AT)
        note = self._memory[_TEXT_AT : _TEXT_AT + length]
        true = time.monotonic() - written < FRESH_S and zlib.crc32(note) == checksum
        return note if true else b""

    def _moment(self, offset: int) -> float:
        moment: float = _MOMENT.unpack_from(self._memory, offset)[0]
        return moment


def shared_memory() -> int:
    """Make memory for a heartbeat, without a name that others could open; its descriptor goes to the worker."""
    descriptor = os.memfd_create("anytron-heartbeat")
    os.ftruncate(descriptor, _SIZE)
    return descriptor
