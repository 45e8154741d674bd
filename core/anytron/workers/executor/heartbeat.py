"""A worker's heartbeat and a note of its current state, in memory that it shares with the process that started it.

No messages are needed: a process that is stopped, frozen or stuck in a library just no longer changes the memory. The
clock is CLOCK_MONOTONIC, which all processes of a machine share and which changes of the date do not affect.

A note describes what the main thread does, which collectives the rank has begun, and which of them are not over. The
collectives come from torch's flight recorders, which keep the last collectives of each library (gloo, NCCL) in a ring
buffer. The heartbeat's thread reads the recorders only when the driver asks for a note, and only while the main thread
does not move. This module does not import torch.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import struct
import sys
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Time between two beats."""
FRESH_S = 10.0
"""Age in seconds at which a note is no longer used: the worker writes a note within two beats after a request."""
_SIZE = 1 << 18
_MOMENT = struct.Struct("d")
_NOTE = struct.Struct("dII")  # when it was written, its length and its checksum; the note follows
_BEAT_AT, _ASKED_AT, _NOTE_AT = 0, 8, 16
_TEXT_AT = _NOTE_AT + _NOTE.size
FRAMES = 6
"""Number of innermost frames of the main thread in a note."""
_DUMP = re.compile(r"_dump_\w+_trace_json")


class Heartbeat:
    """A worker's heartbeat (the time at which it was last alive) and its note, in shared memory.

    The heartbeat begins when the worker's engine is built; until then, the time limit of the start applies.

    Args:
        descriptor: File descriptor of the shared memory; the caller closes it, the memory stays.

    Attributes:
        answers: Number of messages that this process has answered, of which the first reports that the engine is built.
    """

    def __init__(self, descriptor: int) -> None:
        self.answers = 0
        self._memory = mmap.mmap(descriptor, _SIZE)

    @property
    def begun(self) -> bool:
        """Whether there was a beat."""
        return self._moment(_BEAT_AT) > 0.0

    def beat(self) -> None:
        """Signal that this process is alive."""
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
        """Write a note over the last one. A note that is larger than the memory is not written."""
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
    """Make memory for a heartbeat; return its descriptor. It has no name by which other processes could open it."""
    descriptor = os.memfd_create("anytron-heartbeat")
    os.ftruncate(descriptor, _SIZE)
    return descriptor


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has begun and that is not over.

    Attributes:
        library: Library that executes it, as torch names it: ``gloo``, ``nccl``.
        group: Name of the process group, the same on all of its ranks.
        number: Its number among the collectives of this group and library, from 1.
        call: ``all_reduce``, ``broadcast``, ...
        shapes: Shapes of its inputs on this rank, for display.
    """

    library: str
    group: str
    number: int
    call: str
    shapes: str

    @property
    def sequence(self) -> str:
        """Name of the sequence in which :attr:`number` counts: library and group."""
        return f"{self.library} {self.group}"


@dataclass(frozen=True)
class Standing:
    """The state of one rank at one time.

    Attributes:
        moment: When it was noted, in seconds of the rank's own clock; ignored when two states are compared.
        answers: Number of messages that the rank had answered before.
        place: A checksum of the main thread's stack; if it changes, the thread has moved.
        frames: The innermost frames of that stack, the innermost first, for people.
        groups: The ranks of each process group of this rank, by the group's name; empty if the main thread moves.
        descriptions: Descriptions of the groups, by name, for display.
        begun: Number of collectives that this rank has begun, by :attr:`Collective.sequence`.
        complete: Whether the recorders hold all collectives since the start, so that a sequence that is not in
            ``begun`` has had no collectives.
        waits: Collectives of the main thread that are not over, the oldest first.
    """

    moment: float = field(compare=False)
    answers: int
    place: int
    frames: list[str]
    groups: dict[str, list[int]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    waits: list[Collective] = field(default_factory=list)

    def encode(self) -> bytes:
        """Write the state as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, note: bytes) -> Standing | None:
        """Read a state; None if the note is empty."""
        if not note:
            return None
        told = json.loads(note)
        return cls(**{**told, "waits": [Collective(**one) for one in told["waits"]]})


class StandingReporter:
    """Writes a worker's notes; :meth:`beat` is called at each beat of the heartbeat.

    Args:
        heartbeat: Shared memory for the notes, and for requests of them.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._before: int | None = None
        self._fails = False

    def beat(self) -> None:
        """Look at the main thread if a note is requested; at the next call, look again and write the note."""
        if self._fails or not self._heartbeat.asked:
            return
        try:
            standing = main_thread(self._heartbeat.answers)
            before, self._before = self._before, standing.place
            if before is None:
                return
            self._before = None
            self._heartbeat.write((with_collectives(standing) if standing.place == before else standing).encode())
        except Exception:  # the heart must beat on
            logger.warning("this rank cannot report where it stands", exc_info=True)
            self._fails = True


def main_thread(answers: int) -> Standing:
    """Return the state of this rank, with the position of its main thread only.

    Args:
        answers: Number of messages that this rank has answered.
    """
    moment = time.monotonic()
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    place = 0
    frames: list[str] = []
    while frame is not None:
        code = frame.f_code
        place = zlib.crc32(f"{code.co_filename} {code.co_name} {frame.f_lasti}".encode(), place)
        if len(frames) < FRAMES:
            frames.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return Standing(moment, answers, place, frames)


def with_collectives(standing: Standing) -> Standing:
    """Add this rank's collectives as torch has recorded them, if torch is imported and process groups exist."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return standing
    groups, descriptions = {}, {}
    for group in list(c10d._world.pg_map):
        ranks = c10d.get_process_group_ranks(group)
        if len(ranks) > 1:
            groups[group.group_name] = sorted(ranks)
            descriptions[group.group_name] = group.group_desc
    recorded = [json.loads(dump(True, False)).get("entries", []) for dump in _recorders()]
    begun, waits = summary(recorded, _beside_the_main_thread())
    complete = all(not entries or min(entry["record_id"] for entry in entries) == 0 for entries in recorded)
    return replace(
        standing,
        groups=groups,
        descriptions=descriptions,
        begun=begun,
        complete=complete and bool(recorded),
        waits=waits,
    )


def summary(recorded: Iterable[Sequence[dict[str, Any]]], beside: set[str]) -> tuple[dict[str, int], list[Collective]]:
    """Summarise the entries of flight recorders.

    Sends and receives are left out: they have no common number on both sides.

    Args:
        recorded: The entries of each recorder, as torch writes them.
        beside: Ids of threads whose collectives are left out too: their order does not depend on the main thread.

    Returns:
        The number of the last collective of each sequence, and the collectives that are not over, the oldest first.
    """
    begun: dict[str, int] = {}
    waits = []
    for entries in recorded:
        for entry in sorted(entries, key=lambda one: one["record_id"]):
            if entry["is_p2p"] or entry.get("thread_id") in beside:
                continue
            library, _, call = entry["profiling_name"].partition(":")
            shapes = ", ".join(map(str, entry.get("input_sizes", [])))
            one = Collective(library, entry["process_group"][0], entry["collective_seq_id"], call, shapes)
            begun[one.sequence] = one.number
            if not entry["retired"] and entry["state"] != "completed":
                waits.append(one)
    return begun, waits


def _recorders() -> list[Callable[[bool, bool], str]]:
    """Find this torch's flight recorders: functions of two bools, to dump collectives, and to dump only active ones."""
    bindings = sys.modules.get("torch._C._distributed_c10d")
    return [getattr(bindings, name) for name in dir(bindings) if _DUMP.fullmatch(name)]


def _beside_the_main_thread() -> set[str]:
    """Ids of Python's threads besides the main one, without threads of libraries, which run backward passes."""
    main = threading.main_thread()
    return {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not main and not isinstance(thread, threading._DummyThread)
    }
