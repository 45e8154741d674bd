"""Questions to a machine before a process is started there, its answers, and its connections to other machines.

Importing this module imports neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.base.files import exhausted
from anytron.base.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SEEN_S = 5.0
"""Seconds in which a shared file system must show a new file to other machines."""
REACHED_S = 5.0
"""Seconds in which a machine must accept a connection from another machine."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class Note:
    """A file that the driver has just written.

    Attributes:
        path: Its absolute path.
        text: Content of the file: a random number, in hexadecimal.
    """

    path: str
    text: str


@dataclass(frozen=True)
class Question:
    """What the driver asks each machine.

    Attributes:
        notes: Files in the directories that machines must share, by the key that names the directory.
        paths: Absolute paths that ranks read, by the key that names them.
        address: Address of the machine, at which it must listen for other machines; None = it need not listen.
    """

    notes: Mapping[str, Note]
    paths: Mapping[str, str]
    address: str | None


@dataclass(frozen=True)
class Introduction:
    """A machine's answer to a :class:`Question`.

    Attributes:
        name: Its host name.
        versions: Versions of Anytron, Python and torch, by name; ``none`` for what is not installed.
        memory: Bytes of memory that new processes can take.
        disks: Free bytes of the file system of each shared directory that exists there, by key.
        unseen: Keys of the directories in which it does not see the driver's file.
        missing: Keys of the paths that do not exist there.
        port: Port at which it listens now; None if it does not.
        deaf: Why it cannot listen at its address; empty if it can, or was not asked to.
    """

    name: str
    versions: Mapping[str, str]
    memory: int
    disks: Mapping[str, int]
    unseen: tuple[str, ...]
    missing: tuple[str, ...]
    port: int | None = None
    deaf: str = ""


class Doorstep:
    """A socket on which a machine listens while other machines try to reach it. Nothing is read from connections."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, address: str) -> int:
        """Listen on a free port at an address; return the port.

        Raises:
            OSError: This machine does not have the address.
        """
        self.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = self._listener = socket.create_server((address, 0), family=family)
        threading.Thread(target=_welcome, args=(listener,), name="anytron-doorstep", daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            with contextlib.suppress(OSError):  # wakes the thread
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None


def _welcome(listener: socket.socket) -> None:
    """Accept connections until the listener is closed: the kernel keeps only some hundred that are not accepted."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def introduce(question: Question, doorstep: Doorstep) -> Introduction:
    """Answer a question about this machine; listen through ``doorstep`` if ``question.address`` is given.

    A file of the driver that is not seen at once is looked for again, for up to :data:`SEEN_S` seconds.
    """
    port, deaf = None, ""
    if question.address is not None:
        try:
            port = doorstep.open(question.address)
        except OSError as error:
            deaf = error.strerror or str(error)
    deadline, unseen = time.monotonic() + SEEN_S, tuple(question.notes)
    while (unseen := tuple(key for key in unseen if not _seen(question.notes[key]))) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return Introduction(
        name=socket.gethostname(),
        versions={"anytron": __version__, "Python": platform.python_version(), "torch": _installed("torch")},
        memory=_available_memory(),
        disks=dict(_free(question.notes)),
        unseen=unseen,
        missing=tuple(key for key, path in question.paths.items() if not Path(path).exists()),
        port=port,
        deaf=deaf,
    )


def obstacles(places: Sequence[tuple[str, int]], within_s: float = REACHED_S) -> list[str]:
    """Connect to several addresses and ports at once.

    Returns:
        For each address and port, why no connection could be made; empty if one was made.
    """
    with ThreadPoolExecutor(max(1, len(places))) as threads:
        return list(threads.map(lambda place: _obstacle(place, within_s), places))


@contextlib.contextmanager
def written(directories: Mapping[str, str]) -> Iterator[dict[str, Note]]:
    """Write a file into each of several directories, and delete it when the ``with`` block ends.

    Args:
        directories: Paths of the directories, by key. If a directory does not exist yet, its file is written into the
            nearest parent that exists.

    Yields:
        The written files, by key.

    Raises:
        ConfigError: A directory cannot be written into.
        ResourceError: A file system is full, or fails.
    """
    notes: dict[str, Note] = {}
    try:
        for key, directory in directories.items():
            path = Path(directory).resolve()
            above = next(one for one in (path, *path.parents) if one.is_dir())
            note = Note(str(above / f".anytron-{secrets.token_hex(8)}"), secrets.token_hex(16))
            notes[key] = note
            try:
                with open(note.path, "x", encoding="utf-8") as file:  # noqa: PTH123 - mode x: what is there, stays
                    file.write(note.text)
            except OSError as error:
                raise exhausted(error, note.path) or ConfigError(
                    "A directory that the machines of a run share cannot be written into.",
                    where=f"{key}={directory}",
                    why=str(error),
                    fix=f"set {key} to a directory that this user can write into",
                ) from error
        yield notes
    finally:
        for note in notes.values():
            Path(note.path).unlink(missing_ok=True)


def _seen(note: Note) -> bool:
    try:
        return Path(note.path).read_text(encoding="utf-8") == note.text
    except OSError:
        return False


def _free(notes: Mapping[str, Note]) -> Iterator[tuple[str, int]]:
    for key, note in notes.items():
        with contextlib.suppress(OSError):
            found = os.statvfs(Path(note.path).parent)
            yield key, found.f_bavail * found.f_frsize


def _available_memory() -> int:
    """Read ``MemAvailable`` of Linux's /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _obstacle(place: tuple[str, int], within_s: float) -> str:
    try:
        socket.create_connection(place, within_s).close()
    except TimeoutError:
        return f"no answer within {within_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""
