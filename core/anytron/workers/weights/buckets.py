"""Buckets, memory of a fixed size through which tensors are sent, and the interface of carriers, which transport them.

One carrier uses memory that processes of one machine share, the other the network.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import xxhash
from typing_extensions import Self

from anytron.base.errors import ResourceError, TransferError
from anytron.workers.weights.transfer import Piece

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

ALIGNMENT = 64
"""Pieces begin at a multiple of this many bytes, which every dtype's size and a CPU's cache line divide."""
BUCKETS = 2
"""Number of the sender's buckets: one is filled or sent while readers load the other."""


class Bucket:
    """Memory that other processes can map.

    Args:
        descriptor: File descriptor of the memory; the caller closes it. The memory stays as long as it is mapped.
        size: Number of bytes.

    Attributes:
        data: The memory, uint8.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.data = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

    def checksum(self, used: int) -> int:
        """Compute the XXH3 of the first ``used`` bytes; crc32 would take four times as long."""
        return xxhash.xxh3_64_intdigest(self.data[:used].numpy().data)


@contextlib.contextmanager
def memory_file(size: int) -> Iterator[int]:
    """Make memory that has no name, so that no other process can open it.

    It is freed when no process has its descriptor or maps it. Yields the descriptor, and closes it.

    Raises:
        ResourceError: The machine lacks the memory.
    """
    descriptor = os.memfd_create("anytron-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise ResourceError(
                "There is not enough memory for the buckets that carry weights to the rollout.",
                where=f"{size} bytes each",
                why=str(error),
                fix="set rollout.weights=file",
            ) from error
        # A process that has mapped it would die if another one cut it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield descriptor
    finally:
        os.close(descriptor)


class Entry(NamedTuple):
    """The place of a piece in a bucket; a list in JSON.

    Attributes:
        name: The tensor's name.
        dtype: ``bfloat16``, ``float32`` and so on.
        shape: Shape of the whole tensor.
        start: Index of the piece's first element in the tensor.
        size: Number of its elements.
        offset: Offset of the piece's first byte in the bucket.
        optional: :attr:`anytron.workers.weights.transfer.Piece.optional`.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    start: int
    size: int
    offset: int
    optional: bool

    def read(self, bucket: Bucket) -> Piece:
        """Return the piece, as a view of the bucket's memory."""
        dtype = getattr(torch, self.dtype)
        values = bucket.data[self.offset : self.offset + self.size * dtype.itemsize].view(dtype)
        return Piece(self.name, tuple(self.shape), self.start, values, self.optional)


def fill(bucket: Bucket, used: int, tensor: Tensor, start: int) -> tuple[int, int]:
    """Copy as much of a tensor as fits into a bucket.

    Args:
        bucket: The bucket.
        used: Bytes of the bucket that are in use.
        tensor: The tensor, 1-D.
        start: First element to copy.

    Returns:
        Offset of the first byte in the bucket, and the number of copied elements.
    """
    offset = math.ceil(used / ALIGNMENT) * ALIGNMENT
    room = max(0, len(bucket.data) - offset) // tensor.element_size()
    values = tensor[start : start + room]
    target = bucket.data[offset : offset + values.nbytes]
    target.view(tensor.dtype).copy_(values)
    return offset, values.numel()


class TensorOrder:
    """Checks on the receiver's side that every tensor arrives completely and only once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._name, self._next, self._size = "", 0, 0

    def check(self, entry: Entry) -> None:
        """Check that an entry follows the previous entry.

        Raises:
            TransferError: Elements of a tensor are missing, or arrive twice.
        """
        if self._next == self._size and entry.name not in self._seen:
            self._seen.add(entry.name)
            self._name, self._next, self._size = entry.name, 0, math.prod(entry.shape)
        if (entry.name, entry.start) != (self._name, self._next):
            raise TransferError(
                "Pieces of weights are missing or arrived twice.",
                where=f"the piece of {entry.name} that begins at element {entry.start}",
                why=f"the previous piece ended at element {self._next} of {self._name}, which has "
                f"{self._size} elements",
                fix="if this happens again, set rollout.weights=file",
            )
        self._next += entry.size

    def check_end(self, tensors: int) -> None:
        """Check, after the last bucket, that ``tensors`` whole tensors have arrived; raise TransferError if not."""
        if self._next != self._size or len(self._seen) != tensors:
            raise TransferError(
                "Weights are missing.",
                where=self._name,
                why=f"the transfer ended after {self._next} of {self._size} elements of this tensor, which is "
                f"number {len(self._seen)} of the {tensors} tensors that were sent",
                fix="if this happens again, set rollout.weights=file",
            )


class SenderEnd(Protocol):
    """Rank 0's end of a transfer that has begun.

    Attributes:
        buckets: The buckets, which are filled in turn.
    """

    buckets: Sequence[Bucket]

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Wait for a reader's connection for messages; None if no authenticated reader has connected in time."""

    def admit(self, reader: int, connection: socket.socket) -> None:
        """Send a reader what it needs before the first bucket. Raises OSError if the reader has ended."""

    def withdrawn(self, reader: int) -> bool:
        """Whether the driver has reported that a reader will not connect."""

    def send(self, connection: socket.socket, bucket: Bucket, used: int) -> None:
        """Send the first ``used`` bytes of a bucket, after its table of entries. Raises OSError if the reader ended."""


class ReaderEnd(Protocol):
    """A rollout process's end of a transfer.

    Attributes:
        connection: Connection for messages.
    """

    connection: socket.socket

    def admitted(self) -> None:
        """Receive what the sender sends before the first bucket. Raises EOFError or OSError if the sender has ended."""

    def receive(self, number: int, used: int) -> Bucket:
        """Receive the bucket whose table of entries has arrived. Raises as :meth:`admitted`."""


class SenderCarrier(Protocol):
    """A picklable object with which rank 0 lets the readers of a transfer connect."""

    def listen(self, readers: int, timeout_s: float, bucket_bytes: int) -> AbstractContextManager[SenderEnd]:
        """Let readers connect.

        Args:
            readers: Number of readers.
            timeout_s: Seconds that connecting to the driver may take.
            bucket_bytes: Size of a bucket.

        Raises:
            ResourceError: There is no memory for the buckets.
            TransferError: The driver cannot be reached, or this machine cannot listen at the address.
        """


class ReaderCarrier(Protocol):
    """A picklable object with which a rollout process connects to the sender of a transfer."""

    @property
    def where(self) -> str:
        """Description of the sender, for messages."""

    def connect(self, timeout_s: float, bucket_bytes: int) -> AbstractContextManager[ReaderEnd]:
        """Connect to the sender.

        Raises:
            TransferError: The sender cannot be reached, or belongs to another transfer.
        """


class Meeting(Protocol):
    """The driver's part of a transfer, a context manager: it brings both ends together."""

    @property
    def sender(self) -> SenderCarrier:
        """The carrier for rank 0."""

    def reader(self) -> ReaderCarrier | None:
        """The carrier for the readers; None if rank 0 does not listen yet after a short wait."""

    def withdraw(self, reader: int, *, lost: bool) -> None:
        """Tell the sender that a reader will not connect or, if ``lost``, that its process has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...
