"""Buckets in memory that a training rank shares with the rollout processes of its machine.

The memory has no name and is passed through a Unix socket in a private directory of this user. No memory remains,
whichever process is killed. Readers map the sender's own buckets, so that nothing is copied.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.errors import TransferError
from anytron.workers.weights.buckets import BUCKETS, Bucket, memory_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FIRST_LOOK_S, LOOK_S = 0.0002, 0.005
"""First and longest pause, in seconds, between a reader's attempts to connect; the sender mostly comes soon."""


@dataclass(frozen=True)
class SharedMemory:
    """One transfer through shared memory; the same object serves both ends and the driver.

    It is a :class:`~anytron.workers.weights.buckets.SenderCarrier`, the
    :class:`~anytron.workers.weights.buckets.ReaderCarrier` of each reader, and a
    :class:`~anytron.workers.weights.buckets.Meeting`.

    Attributes:
        path: Path of the socket, which the sender creates and deletes, in a private directory of this user.
    """

    path: str

    @property
    def where(self) -> str:
        """The path of the socket, for messages."""
        return self.path

    @property
    def sender(self) -> SharedMemory:
        """The carrier for rank 0: this object."""
        return self

    def reader(self) -> SharedMemory:
        """The carrier for the readers: this object; readers themselves wait for the sender."""
        return self

    @contextlib.contextmanager
    def listen(self, readers: int, timeout_s: float, bucket_bytes: int) -> Iterator[_SenderEnd]:
        """Make the buckets and the socket.

        Raises:
            ResourceError: There is no memory for the buckets.
        """
        del timeout_s
        with contextlib.ExitStack() as opened:
            descriptors = [opened.enter_context(memory_file(bucket_bytes)) for _ in range(BUCKETS)]
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            with self._address() as address:
                listener.bind(address)
            opened.callback(Path(self.path).unlink, missing_ok=True)
            listener.listen(readers)
            yield _SenderEnd(self, listener, descriptors, bucket_bytes)

    @contextlib.contextmanager
    def connect(self, timeout_s: float, bucket_bytes: int) -> Iterator[_ReaderEnd]:
        """Wait for the sender and connect to it.

        Raises:
            TransferError: There was no sender in time.
        """
        with contextlib.closing(self._connected(timeout_s)) as connection:
            yield _ReaderEnd(connection, bucket_bytes)

    def withdraw(self, reader: int, *, lost: bool) -> None:
        """Record that a reader will not connect. The sender itself notices the end of a connected reader."""
        del lost
        self._withdrawn(reader).touch()

    def withdrawn(self, reader: int) -> bool:
        """Whether a reader was withdrawn."""
        return self._withdrawn(reader).exists()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Delete what is left in the directory, when both ends are done or dead."""
        path = Path(self.path)
        for file in (path, *path.parent.glob(f"{path.name}.without-*")):
            file.unlink(missing_ok=True)

    def _connected(self, timeout_s: float) -> socket.socket:
        deadline, pause = time.monotonic() + timeout_s, FIRST_LOOK_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout_s)
            try:
                with self._address() as address:
                    connection.connect(address)
            except OSError as error:  # mostly: the sender has not made it yet
                connection.close()
                if time.monotonic() > deadline:
                    why = f"its socket could not be reached for {timeout_s:g} s: {error}"
                    raise TransferError(
                        "The training rank did not begin to send weights.",
                        where=self.path,
                        why=why,
                        fix="read the logs of the training ranks; if they are only slow, raise executor.call_timeout_s",
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, LOOK_S)
            else:
                return connection

    @contextlib.contextmanager
    def _address(self) -> Iterator[str]:
        """Yield a path of the socket that is short enough for a socket's address."""
        path = Path(self.path)
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{directory}/{path.name}"
        finally:
            os.close(directory)

    def _withdrawn(self, reader: int) -> Path:
        return Path(f"{self.path}.without-{reader}")


class _SenderEnd:
    """A :class:`~anytron.workers.weights.buckets.SenderEnd`."""

    def __init__(
        self, way: SharedMemory, listener: socket.socket, descriptors: Sequence[int], bucket_bytes: int
    ) -> None:
        self.buckets: Sequence[Bucket] = [Bucket(descriptor, bucket_bytes) for descriptor in descriptors]
        self._way, self._listener, self._descriptors = way, listener, descriptors

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Wait for a connection."""
        self._listener.settimeout(timeout_s)
        try:
            return self._listener.accept()[0]
        except TimeoutError:
            return None

    def admit(self, reader: int, connection: socket.socket) -> None:
        """Hand over the buckets."""
        del reader
        socket.send_fds(connection, [b"\0"], self._descriptors)

    def withdrawn(self, reader: int) -> bool:
        """Whether the driver has withdrawn a reader."""
        return self._way.withdrawn(reader)

    def send(self, connection: socket.socket, bucket: Bucket, used: int) -> None:
        """Do nothing: the reader sees the bucket."""


class _ReaderEnd:
    """A :class:`~anytron.workers.weights.buckets.ReaderEnd`."""

    def __init__(self, connection: socket.socket, bucket_bytes: int) -> None:
        self.connection = connection
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []

    def admitted(self) -> None:
        """Map the buckets."""
        _, descriptors, _, _ = socket.recv_fds(self.connection, 1, BUCKETS, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(descriptors) != BUCKETS:
                raise EOFError("it sent no buckets")
            self._buckets = [Bucket(descriptor, self._bucket_bytes) for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self, number: int, used: int) -> Bucket:
        """Return the sender's bucket itself."""
        del used
        return self._buckets[number % BUCKETS]
