"""Weights on a stream from rank 0 to rollout processes, bucket by bucket: the protocol for all carriers.

Rank 0 fills one bucket while rollout processes load the other. A carrier connects both sides and transports
buckets: memory that processes of one machine share (:mod:`anytron.workers.weights.memory`), or connections
between machines (:mod:`anytron.workers.weights.network`).

* If a reader ends or refuses the weights, the other readers still receive them.
* If the sender ends early, its readers raise an error.
* A reader that will not connect must be withdrawn (:class:`~anytron.workers.weights.buckets.Meeting`); otherwise the
  sender would wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError, TransferError
from anytron.workers.weights.buckets import ALIGNMENT, BUCKETS, Entry, TensorOrder, fill
from anytron.workers.weights.messages import receive, send

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from anytron.workers.weights.buckets import Bucket, ReaderCarrier, ReaderEnd, SenderCarrier, SenderEnd
    from anytron.workers.weights.transfer import Piece, ReceivedWeights

logger = logging.getLogger(__name__)

BUCKET_BYTES = 16 << 20
"""Size of each bucket. Larger buckets are not faster: the reader finds what was just written in the CPU's cache."""
LOOK_S = 0.005
"""How often a sender looks for readers that were withdrawn."""


def bucket_bytes_for(num_bytes: int) -> int:
    """Choose the size of buckets for weights of about the given number of bytes; small weights need only one bucket.

    Buckets are allocated for each transfer, and allocating memory takes as long as filling it.
    """
    return max(ALIGNMENT, min(BUCKET_BYTES, 1 << num_bytes.bit_length()))


@dataclass(frozen=True)
class StreamedWeights:
    """Facts about weights that were sent: the number of completed optimizer updates, and the size of all tensors."""

    version: int
    num_bytes: int


@dataclass(frozen=True)
class WeightStream:
    """The sender's end of a transfer: a :class:`~anytron.workers.weights.transfer.WeightDestination`.

    Attributes:
        carrier: Carrier, which connects readers and transports buckets.
        readers: Number of rollout processes that receive the weights; they are numbered from 0.
        timeout_s: Seconds that one end waits for the other at any point.
        bucket_bytes: Size of each of the two buckets, a multiple of 64.
    """

    carrier: SenderCarrier
    readers: int
    timeout_s: float
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.bucket_bytes < ALIGNMENT or self.bucket_bytes % ALIGNMENT:
            raise ValueError(f"a bucket of {self.bucket_bytes} bytes: not a multiple of {ALIGNMENT}")

    def send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, is_optional: Callable[[str], bool]
    ) -> StreamedWeights:
        """Send weights to all readers that connect and stay connected.

        Raises:
            EngineError: A name occurred twice.
            ResourceError: There is no memory for the buckets.
            TransferError: A reader did not connect in time and was not withdrawn; or readers cannot connect at all.
        """
        num_bytes = 0
        with _one_thread(), self.carrier.listen(self.readers, self.timeout_s, self.bucket_bytes) as end:
            sender = _Sender(self, end, version)
            try:
                for name, tensor in weights:
                    sender.add(name, tensor, optional=is_optional(name))
                    num_bytes += tensor.nbytes
                sender.end()
            finally:
                sender.close()
        return StreamedWeights(version, num_bytes)

    def origin(self, carrier: ReaderCarrier, reader: int) -> StreamOrigin:
        """Return the origin from which the reader with the number ``reader`` receives the weights."""
        return StreamOrigin(carrier, reader, self.timeout_s, self.bucket_bytes)


@dataclass(frozen=True)
class StreamOrigin:
    """One reader's end of a transfer: a :class:`~anytron.workers.weights.transfer.WeightOrigin`.

    Attributes:
        carrier: Carrier, which connects the reader to the sender and transports buckets.
        reader: Number of the reader.
        timeout_s: Seconds that one end waits for the other at any point.
        bucket_bytes: Size of each of the two buckets, a multiple of 64.
    """

    carrier: ReaderCarrier
    reader: int
    timeout_s: float
    bucket_bytes: int

    @contextlib.contextmanager
    def open(self) -> Iterator[ReceivedWeights]:
        """Connect to the sender, as soon as it listens.

        Raises:
            TransferError: There was no sender in time, or the sender has ended or belongs to another transfer.
        """
        where = self.carrier.where
        with _one_thread(), self.carrier.connect(self.timeout_s, self.bucket_bytes) as end:
            with _transfer_errors("The weights did not begin to arrive.", where):
                send(end.connection, {"reader": self.reader})
                end.admitted()
                begin = receive(end.connection)
            yield _Received(where, end, begin["version"])


@dataclass(frozen=True)
class _Received:
    where: str
    end: ReaderEnd
    version: int

    def __iter__(self) -> Iterator[Piece]:
        order, number = TensorOrder(), 0
        while "tensors" not in (table := self._table()):
            with self._transfer_errors():
                bucket = self.end.receive(number, table["used"])
            found, sent = bucket.checksum(table["used"]), table["xxh3"]
            if (found, number) != (sent, table["number"]):
                raise TransferError(
                    "Weights were damaged in transfer.",
                    where=f"bucket {number} of the weights of version {self.version}",
                    why=f"bucket {table['number']} was sent with the XXH3 checksum {sent:016x}, but what arrived has "
                    f"{found:016x}",
                    fix="if this happens again, set rollout.weights=file",
                )
            for fields in table["entries"]:
                entry = Entry(*fields)
                order.check(entry)
                yield entry.read(bucket)
            self._done(number)
            number += 1
        order.check_end(table["tensors"])
        self._done(number)

    def _table(self) -> dict[str, Any]:
        with self._transfer_errors():
            return receive(self.end.connection)

    def _done(self, number: int) -> None:
        with self._transfer_errors():
            send(self.end.connection, {"done": number})

    def _transfer_errors(self) -> contextlib.AbstractContextManager[None]:
        return _transfer_errors("Only a part of the weights arrived.", self.where)


class _Sender:
    def __init__(self, stream: WeightStream, end: SenderEnd, version: int) -> None:
        self._stream, self._end, self._version = stream, end, version
        self._names: set[str] = set()
        self._number, self._used, self._entries = 0, 0, list[Entry]()
        self._readers: list[socket.socket] | None = None  # None: not waited for yet

    def close(self) -> None:
        """Close the connections to the readers."""
        for reader in self._readers or []:
            reader.close()

    def add(self, name: str, tensor: Tensor, *, optional: bool) -> None:
        """Put a tensor into buckets, and send each bucket that is full.

        Raises:
            EngineError: A tensor of this name was added before.
            TransferError: A reader did not connect in time.
        """
        if name in self._names:
            raise EngineError(
                "A weight was exported twice.",
                where=f"{name}, weights of version {self._version}",
                why="the training engine exports two tensors of this name",
                fix="report this to the authors of the training engine",
            )
        self._names.add(name)
        if self._readers == []:
            return
        values = tensor.detach().reshape(-1)
        dtype, start = str(tensor.dtype).removeprefix("torch."), 0
        while True:
            offset, count = fill(self._bucket, self._used, values, start)
            if count or not len(values):
                self._entries.append(Entry(name, dtype, tuple(tensor.shape), start, count, offset, optional))
                self._used = offset + count * values.element_size()
                start += count
            if start == len(values):
                return
            self._send_bucket()

    def end(self) -> None:
        """Send the last bucket, and wait until readers have loaded everything.

        Raises:
            TransferError: A reader did not connect in time.
        """
        self._send_bucket()
        self._tell({"tensors": len(self._names)})
        self._await(self._number - 1)
        self._await(self._number)

    @property
    def _bucket(self) -> Bucket:
        return self._end.buckets[self._number % BUCKETS]

    def _send_bucket(self) -> None:
        """Send a bucket, and wait until the other one is free."""
        table = {
            "number": self._number,
            "used": self._used,
            "xxh3": self._bucket.checksum(self._used),
            "entries": self._entries,
        }
        self._tell(table)
        self._number, self._used, self._entries = self._number + 1, 0, []
        if self._number >= BUCKETS:
            self._await(self._number - BUCKETS)

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to all readers: the end of the weights, or a table of entries, followed by its bucket."""
        if self._readers is None:
            self._readers = []
            self._accept(self._readers)
        for reader in list(self._readers):
            with self._unless_it_leaves(reader):
                send(reader, message)
                if "used" in message:
                    self._end.send(reader, self._bucket, message["used"])

    def _await(self, number: int) -> None:
        """Wait until every reader is done with a message."""
        for reader in list(self._readers or []):
            with self._unless_it_leaves(reader):
                done = receive(reader)["done"]
                assert done == number, f"a reader is done with {done}, not {number}"

    def _accept(self, come: list[socket.socket]) -> None:
        """Wait for the readers to connect, and send each what it needs before the first bucket."""
        stream, end = self._stream, self._end
        deadline = time.monotonic() + stream.timeout_s
        missing = set(range(stream.readers))
        while missing := {reader for reader in missing if not end.withdrawn(reader)}:
            if time.monotonic() > deadline:
                raise TransferError(
                    "A rollout process did not connect to receive its weights.",
                    where=f"rollout processes {sorted(missing)} of {stream.readers}, counted from 0",
                    why=f"the training rank waited {stream.timeout_s:g} s for them",
                    fix="read the logs of these processes; if they are only slow, raise executor.call_timeout_s",
                )
            connection = end.accept(LOOK_S)
            if connection is None:
                continue
            connection.settimeout(stream.timeout_s)
            try:
                reader = receive(connection)["reader"]
                end.admit(reader, connection)
                send(connection, {"version": self._version})
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
            logger.warning("a rollout process disconnected before it had all weights: %s", error)
            reader.close()
            assert self._readers is not None
            self._readers.remove(reader)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread of this process.

    The sender and its readers copy at the same time. If each of them used all processors of the machine, as torch does,
    they would wait for each other's threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _transfer_errors(what: str, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        why = f"the sender has ended, or does not answer: {error}"
        fix = "read the log of rank 0 of the training ranks, which sends the weights"
        raise TransferError(what, where=where, why=why, fix=fix) from error
