"""Weights through memory that a training rank shares with the rollout processes of its machine, bucket by bucket.

Rank 0 fills one bucket while rollout processes read the other. Buckets are memory without a name, handed over through
a Unix socket in a directory of this user alone; whatever is killed, nothing of them stays. Over the same socket go the
table of each bucket with its checksum, and the reader's word that it needs the bucket no longer.

* A reader that ends, or refuses the weights, leaves; the others get theirs.
* A sender that ends leaves readers without the end of the weights, which is an error there.
* A reader that does not come must be withdrawn (:meth:`WeightStream.withdraw`): the sender would wait for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from anytron.engines.weight_buckets import ALIGNMENT, Bucket, Entry, TensorOrder, fill, memory_file
from anytron.errors import EngineError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from anytron.engines.weights import Piece, ReceivedWeights

logger = logging.getLogger(__name__)

BUCKETS = 2
BUCKET_BYTES = 16 << 20
"""Of each bucket. Larger ones are no faster: what one end has just written the other finds in the processor's cache."""
LOOK_S = 0.005
"""How often a sender looks for readers that were withdrawn, and a reader for its sender."""


@dataclass(frozen=True)
class StreamedWeights:
    """What was sent: optimizer updates behind it, and the size of all tensors."""

    version: int
    num_bytes: int


@dataclass(frozen=True)
class WeightStream:
    """One transfer: a :class:`~anytron.engines.weights.WeightDestination`, and the origin of each reader.

    Attributes:
        path: Of the socket, which the sender makes and deletes, in a directory of this user alone.
        readers: How many rollout processes get the weights; they are numbered from 0.
        timeout_s: How long one end waits for the other at any point.
        bucket_bytes: Size of each of the two buckets, a multiple of 64.
    """

    path: str
    readers: int
    timeout_s: float
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.bucket_bytes < ALIGNMENT or self.bucket_bytes % ALIGNMENT:
            raise ValueError(f"a bucket of {self.bucket_bytes} bytes: not a multiple of {ALIGNMENT}")

    def send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, is_optional: Callable[[str], bool]
    ) -> StreamedWeights:
        """Send weights to all readers that come and stay.

        Raises:
            EngineError: A name came twice.
            ResourceError: There is no memory for the buckets.
            TransferError: A reader neither came nor was withdrawn.
        """
        num_bytes = 0
        with _Sender(self, version) as sender:
            for name, tensor in weights:
                sender.add(name, tensor, optional=is_optional(name))
                num_bytes += tensor.nbytes
            sender.end()
        return StreamedWeights(version, num_bytes)

    def origin(self, reader: int) -> StreamOrigin:
        """Where the reader of a number gets the weights."""
        return StreamOrigin(self, reader)

    def withdraw(self, reader: int) -> None:
        """Say that a reader will not come; it may have come already."""
        self._withdrawn(reader).touch()

    def withdrawn(self, reader: int) -> bool:
        """Whether a reader was withdrawn."""
        return self._withdrawn(reader).exists()

    def remove(self) -> None:
        """Delete what is left in the directory, when both ends are done or dead."""
        for file in (Path(self.path), *map(self._withdrawn, range(self.readers))):
            file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def address(self) -> Iterator[str]:
        """A name of the socket that is never too long for one."""
        path = Path(self.path)
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{directory}/{path.name}"
        finally:
            os.close(directory)

    def _withdrawn(self, reader: int) -> Path:
        return Path(f"{self.path}.without-{reader}")


@dataclass(frozen=True)
class StreamOrigin:
    """One reader's end of a stream: a :class:`~anytron.engines.weights.WeightOrigin`."""

    stream: WeightStream
    reader: int

    @contextlib.contextmanager
    def open(self) -> Iterator[ReceivedWeights]:
        """Wait for the sender and connect to it.

        Raises:
            TransferError: No sender came in time, or it has ended.
        """
        with contextlib.closing(_connect(self.stream)) as connection:
            with _transfer_errors("The weights did not begin to arrive.", self.stream):
                _send(connection, {"reader": self.reader})
                descriptors = _take_descriptors(connection)
                try:
                    begin = _receive(connection)
                    buckets = [Bucket(descriptor, self.stream.bucket_bytes) for descriptor in descriptors]
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
            yield _Received(self.stream, connection, buckets, begin["version"])


@dataclass(frozen=True)
class _Received:
    stream: WeightStream
    connection: socket.socket
    buckets: Sequence[Bucket]
    version: int

    def __iter__(self) -> Iterator[Piece]:
        order = TensorOrder()
        for number, table in enumerate(self._messages()):
            if "tensors" in table:
                order.check_end(table["tensors"])
                self._send({"done": number})
                return
            bucket = self.buckets[number % BUCKETS]
            found, sent = bucket.checksum(table["used"]), table["xxh3"]
            if (found, number) != (sent, table["number"]):
                raise TransferError(
                    "Weights were damaged in transfer.",
                    where=f"bucket {number}, version {self.version}",
                    why=f"XXH3 {found:016x}, not {sent:016x}, in what was sent as bucket {table['number']}",
                )
            for fields in table["entries"]:
                entry = Entry(*fields)
                order.check(entry)
                yield entry.read(bucket)
            self._send({"done": number})

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            with _transfer_errors("The weights ended before all had come.", self.stream):
                message = _receive(self.connection)
            yield message

    def _send(self, message: dict[str, Any]) -> None:
        with _transfer_errors("The weights ended before all had come.", self.stream):
            _send(self.connection, message)


class _Sender:
    def __init__(self, stream: WeightStream, version: int) -> None:
        self._stream, self._version = stream, version
        self._names: set[str] = set()
        self._number, self._used, self._entries = 0, 0, list[Entry]()
        self._readers: list[socket.socket] | None = None  # None: not waited for yet
        with contextlib.ExitStack() as opened:
            self._descriptors = [opened.enter_context(memory_file(stream.bucket_bytes)) for _ in range(BUCKETS)]
            self._buckets = [Bucket(descriptor, stream.bucket_bytes) for descriptor in self._descriptors]
            self._listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            with stream.address() as address:
                self._listener.bind(address)
            opened.callback(Path(stream.path).unlink, missing_ok=True)
            self._listener.listen(stream.readers)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for reader in self._readers or []:
            reader.close()
        self._opened.close()

    def add(self, name: str, tensor: Tensor, *, optional: bool) -> None:
        """Put a tensor into buckets; those that are full are sent."""
        if name in self._names:
            raise EngineError("A weight was exported twice.", where=f"{name}, version {self._version}")
        self._names.add(name)
        if self._readers == []:
            return
        values = tensor.detach().reshape(-1)
        dtype, start = str(tensor.dtype).removeprefix("torch."), 0
        while True:
            offset, count = fill(self._buckets[self._number % BUCKETS], self._used, values, start)
            if count or not len(values):
                self._entries.append(Entry(name, dtype, tuple(tensor.shape), start, count, offset, optional))
                self._used = offset + count * values.element_size()
                start += count
            if start == len(values):
                return
            self._send_bucket()

    def end(self) -> None:
        """Send the last bucket, and wait until readers have loaded everything."""
        self._send_bucket()
        self._tell({"tensors": len(self._names)})
        self._await(self._number - 1)
        self._await(self._number)

    def _send_bucket(self) -> None:
        """Send a bucket, and wait until the other one is free."""
        self._tell(
            {
                "number": self._number,
                "used": self._used,
                "xxh3": self._buckets[self._number % BUCKETS].checksum(self._used),
                "entries": self._entries,
            }
        )
        self._number, self._used, self._entries = self._number + 1, 0, []
        if self._number >= BUCKETS:
            self._await(self._number - BUCKETS)

    def _tell(self, message: dict[str, Any]) -> None:
        if self._readers is None:
            self._readers = []
            self._accept(self._readers)
        for reader in list(self._readers):
            with self._unless_it_leaves(reader):
                _send(reader, message)

    def _await(self, number: int) -> None:
        """Wait until every reader is done with a message."""
        for reader in list(self._readers or []):
            with self._unless_it_leaves(reader):
                done = _receive(reader)["done"]
                assert done == number, f"a reader is done with {done}, not {number}"

    def _accept(self, come: list[socket.socket]) -> None:
        """Wait for the readers, and hand them the buckets."""
        stream = self._stream
        self._listener.settimeout(LOOK_S)
        deadline = time.monotonic() + stream.timeout_s
        missing = set(range(stream.readers))
        while missing := {reader for reader in missing if not stream.withdrawn(reader)}:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise TransferError(
                        "A rollout process does not come for its weights.",
                        where=f"readers {sorted(missing)} of {stream.readers}",
                        why=f"waited {stream.timeout_s:g} s",
                    ) from None
                continue
            connection.settimeout(stream.timeout_s)
            try:
                reader = _receive(connection)["reader"]
                socket.send_fds(connection, [b"\0"], self._descriptors)
                _send(connection, {"version": self._version})
            except (OSError, EOFError):  # it has ended: the driver withdraws it
                connection.close()
            else:
                missing.discard(reader)
                come.append(connection)

    @contextlib.contextmanager
    def _unless_it_leaves(self, reader: socket.socket) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            logger.warning("a rollout process has left before it had all weights: %s", error)
            reader.close()
            assert self._readers is not None
            self._readers.remove(reader)


def _connect(stream: WeightStream) -> socket.socket:
    deadline = time.monotonic() + stream.timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(stream.timeout_s)
        try:
            with stream.address() as address:
                connection.connect(address)
        except OSError as error:  # mostly: the sender has not made it yet
            connection.close()
            if time.monotonic() > deadline:
                why = f"{error}, for {stream.timeout_s:g} s"
                raise TransferError("Nobody sends weights.", where=stream.path, why=why) from error
            time.sleep(LOOK_S)
        else:
            return connection


@contextlib.contextmanager
def _transfer_errors(what: str, stream: WeightStream) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise TransferError(what, where=stream.path, why=f"the sender has ended, or does nothing: {error}") from error


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(8, "big") + text)


def _receive(connection: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(_receive_exactly(connection, 8), "big")
    message: dict[str, Any] = json.loads(_receive_exactly(connection, size))
    return message


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the connection was closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _take_descriptors(connection: socket.socket) -> list[int]:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, BUCKETS, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) != BUCKETS:
        raise EOFError("no buckets came")
    return descriptors
