"""What a weight stream needs of whatever carries its buckets: memory that is shared, or the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from typing_extensions import Self

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from anytron.workers.weights.buckets import Bucket

BUCKETS = 2
"""Of each end: one is filled, or on its way, while the other one is loaded."""


class SenderEnd(Protocol):
    """Rank 0's end of a transfer that has begun.

    Attributes:
        buckets: The memory that is filled, in turns.
    """

    buckets: Sequence[Bucket]

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Wait for a connection for messages; None if nobody came that has a right to."""

    def admit(self, reader: int, connection: socket.socket) -> None:
        """Give a reader what it needs before the first bucket. Raises OSError if it is gone."""

    def withdrawn(self, reader: int) -> bool:
        """Whether the driver has said that a reader will not come."""

    def send(self, connection: socket.socket, bucket: Bucket, used: int) -> None:
        """Bring the first bytes of a bucket to a reader that has been sent its table. Raises OSError likewise."""


class ReaderEnd(Protocol):
    """A rollout process's end.

    Attributes:
        connection: For messages.
    """

    connection: socket.socket

    def admitted(self) -> None:
        """Take what the sender gives a reader before the first bucket. Raises EOFError or OSError if it is gone."""

    def receive(self, number: int, used: int) -> Bucket:
        """Take the bucket whose table has come. Raises likewise."""


class SenderCarrier(Protocol):
    """What rank 0 is told, to begin: plain data."""

    def listen(self, readers: int, timeout_s: float, bucket_bytes: int) -> AbstractContextManager[SenderEnd]:
        """Let readers come.

        Raises:
            ResourceError: There is no memory for the buckets.
            TransferError: Readers cannot come this way.
        """


class ReaderCarrier(Protocol):
    """What a rollout process is told, to begin: plain data."""

    @property
    def where(self) -> str:
        """The sender, for people."""

    def connect(self, timeout_s: float, bucket_bytes: int) -> AbstractContextManager[ReaderEnd]:
        """Come to the sender.

        Raises:
            TransferError: It cannot be reached, or is another one.
        """


class Meeting(Protocol):
    """The driver's part of a transfer, a context manager: it brings both ends together."""

    @property
    def sender(self) -> SenderCarrier:
        """What rank 0 is told."""

    def reader(self) -> ReaderCarrier | None:
        """What the readers are told; None if a moment has passed and rank 0 does not listen yet."""

    def withdraw(self, reader: int, *, lost: bool) -> None:
        """Tell the sender that a reader will not come if it has not; or that it is gone, whether it had come or not."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...
