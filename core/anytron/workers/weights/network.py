"""Buckets over TCP, for rollout processes on other machines than rank 0.

::

    driver  <--- port ----  rank 0  <-- connect --  reader 0, reader 1 ...
            -- withdraw -->         -- buckets --->

Rank 0 listens at a free port during the transfer and tells the driver its number; only then are readers told where to
connect. Each connection is authenticated in both directions with a secret that the driver makes for this transfer and
that travels with the calls of the executor (:mod:`anytron.workers.weights.messages`).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from anytron.base.errors import TransferError
from anytron.base.files import exhausted
from anytron.workers.weights.buckets import BUCKETS, Bucket, memory_file
from anytron.workers.weights.messages import (
    CALLER_BYTES,
    Challenge,
    new_secret,
    prove_to_called,
    receive,
    receive_into,
    send,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CONNECTED_S = 20.0
"""Seconds to open a connection to a peer that listens already: if it takes longer, a firewall blocks it."""
MOMENT_S = 0.05
"""Seconds that :meth:`NetworkMeeting.reader` waits for rank 0."""
PROOF_S = 10.0
"""Seconds within which a peer that has connected must prove that it knows the secret."""
CALLERS = 64
"""Largest number of connections that have not proved that they know the secret. One more, and the oldest is refused: a
reader needs only the time of a message and its answer."""
REFUSALS = 10
"""Number of refused connections that are logged per transfer: strangers must not fill the disk."""
BACKLOG = 64
_DRIVER, _READER = "anytron weights, driver", "anytron weights, reader"


class NetworkMeeting:
    """A :class:`~anytron.workers.weights.buckets.Meeting` of processes on several machines.

    Args:
        driver: Address of this process's machine at which rank 0's machine reaches it.
        sender: Address at which the readers' machines reach rank 0's machine.

    Attributes:
        sender: The carrier for rank 0.

    Raises:
        TransferError: This machine does not have the address.
    """

    def __init__(self, driver: str, sender: str) -> None:
        self._opened = contextlib.ExitStack()
        listener = _listening(driver)
        self._control: socket.socket | None = None
        self.sender = NetworkSender(_name(listener), sender, new_secret())
        self._door = self._opened.enter_context(contextlib.closing(_Door(listener, self.sender.secret, _DRIVER)))

    def reader(self) -> NetworkReader | None:
        """Wait a short time for the port of rank 0; None if rank 0 has not sent it."""
        control = self._door.accept(MOMENT_S)
        if control is None:
            return None
        self._control = self._opened.enter_context(control)
        try:
            port = receive(control)["port"]
        except (OSError, EOFError):  # it has ended, of which its call will tell
            return None
        self._door.close()
        return NetworkReader((self.sender.address, port), self.sender.secret)

    def withdraw(self, reader: int, *, lost: bool) -> None:
        """Tell rank 0 that a reader will not connect or, if ``lost``, that its process has ended."""
        if self._control is not None:
            with contextlib.suppress(OSError):  # rank 0 is gone
                send(self._control, {"reader": reader, "lost": lost})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()


@dataclass(frozen=True)
class NetworkSender:
    """Rank 0's side of a transfer over TCP: a :class:`~anytron.workers.weights.buckets.SenderCarrier`.

    Attributes:
        driver: Address and port at which the driver waits for rank 0.
        address: Address of rank 0's machine, the only one on which it listens.
        secret: Secret of this transfer.
    """

    driver: tuple[str, int]
    address: str
    secret: bytes = field(repr=False)

    @contextlib.contextmanager
    def listen(self, readers: int, timeout_s: float, bucket_bytes: int) -> Iterator[_SenderEnd]:
        """Listen at a free port, and tell the driver.

        Raises:
            ResourceError: There is no memory for the buckets.
            TransferError: The driver cannot be reached, or this machine cannot listen at the address.
        """
        del readers
        with contextlib.ExitStack() as opened:
            descriptors = [opened.enter_context(memory_file(bucket_bytes)) for _ in range(BUCKETS)]
            listener = _listening(self.address)
            door = opened.enter_context(contextlib.closing(_Door(listener, self.secret, _READER)))
            control = opened.enter_context(_connected(self.driver, timeout_s, self.secret, _DRIVER))
            send(control, {"port": _name(listener)[1]})
            end = _SenderEnd(door, [Bucket(one, bucket_bytes) for one in descriptors])
            control.settimeout(None)
            heeding = threading.Thread(target=end.heed, args=(control,), name="anytron-weights", daemon=True)
            heeding.start()
            opened.callback(heeding.join)
            opened.callback(_shut, control)
            yield end


@dataclass(frozen=True)
class NetworkReader:
    """A reader's side of a transfer over TCP: a :class:`~anytron.workers.weights.buckets.ReaderCarrier`.

    Attributes:
        sender: Address and port at which rank 0 listens.
        secret: Secret of this transfer.
    """

    sender: tuple[str, int]
    secret: bytes = field(repr=False)

    @property
    def where(self) -> str:
        """Address and port of rank 0, for messages."""
        return f"{self.sender[0]} port {self.sender[1]}"

    @contextlib.contextmanager
    def connect(self, timeout_s: float, bucket_bytes: int) -> Iterator[_ReaderEnd]:
        """Connect to rank 0.

        Raises:
            TransferError: The listener cannot be reached, or one side does not know the secret.
        """
        with (
            memory_file(bucket_bytes) as descriptor,
            _connected(self.sender, timeout_s, self.secret, _READER) as connection,
        ):
            yield _ReaderEnd(connection, Bucket(descriptor, bucket_bytes))


class _Door:
    """Accepts connections of peers that prove that they know a secret; a slow peer does not delay the others.

    Args:
        listener: Listening socket; closed with the door.
        secret: The secret that peers must know.
        purpose: Purpose of the connections, as for :class:`~anytron.workers.weights.messages.Challenge`.
    """

    def __init__(self, listener: socket.socket, secret: bytes, purpose: str) -> None:
        listener.setblocking(False)
        self.listener = listener
        self._secret, self._purpose = secret, purpose
        self._callers: list[_Caller] = []  # in the order in which they came
        self._refused = 0

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Wait for a connection that proves that it knows the secret; None if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._refuse_the_late()
            left_s = max(0.0, deadline - time.monotonic())
            said = wait([self.listener, *(caller.connection for caller in self._callers)], min(left_s, PROOF_S))
            for caller in [one for one in self._callers if one.connection in said]:
                if self._hear(caller):
                    return caller.connection
            if self.listener in said:
                self._meet()
            if not left_s:
                return None

    def close(self) -> None:
        """Close the listener, and connections that have not proved yet that they know the secret."""
        self.listener.close()
        while self._callers:
            self._callers.pop().connection.close()

    def _meet(self) -> None:
        try:
            connection, address = self.listener.accept()
        except OSError:  # it has left again
            return
        connection.setblocking(False)
        caller = _Caller(connection, address[0], Challenge(self._secret, self._purpose), time.monotonic() + PROOF_S)
        self._callers.append(caller)
        if len(self._callers) > CALLERS:
            self._refuse(self._callers[0], "newer connections came")
        with self._unless_refused(caller):
            connection.sendall(caller.challenge.text)

    def _hear(self, caller: _Caller) -> bool:
        """Take what a caller says; return whether it has proved that it knows the secret."""
        proved = False
        with self._unless_refused(caller):
            said = caller.connection.recv(CALLER_BYTES - len(caller.said))
            if not said:
                raise EOFError("the connection was closed")
            caller.said += said
            if len(caller.said) == CALLER_BYTES:
                caller.connection.sendall(caller.challenge.answer(bytes(caller.said)))
                caller.connection.settimeout(PROOF_S)
                caller.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._callers.remove(caller)
                proved = True
        return proved

    def _refuse_the_late(self) -> None:
        now = time.monotonic()
        for caller in [one for one in self._callers if now > one.deadline]:
            self._refuse(caller, f"it did not authenticate within {PROOF_S:g} s")

    @contextlib.contextmanager
    def _unless_refused(self, caller: _Caller) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            self._refuse(caller, str(error))

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._callers.remove(caller)
        caller.connection.close()
        self._refused += 1
        if self._refused <= REFUSALS:
            logger.warning("a connection from %s was refused: %s", caller.address, why)
        if self._refused == REFUSALS:
            logger.warning("further refusals in this transfer are not logged")


@dataclass
class _Caller:
    connection: socket.socket
    address: str
    challenge: Challenge
    deadline: float
    said: bytearray = field(default_factory=bytearray)


class _SenderEnd:
    """A :class:`~anytron.workers.weights.buckets.SenderEnd`."""

    def __init__(self, door: _Door, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._door = door
        self._lock = threading.Lock()
        self._withdrawn: set[int] = set()
        self._lost: set[int] = set()
        self._admitted: dict[int, socket.socket] = {}

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Wait for a connection of a peer that knows the secret."""
        return self._door.accept(timeout_s)

    def admit(self, reader: int, connection: socket.socket) -> None:
        """Record which reader a connection belongs to."""
        with self._lock:
            if reader in self._lost:
                raise ConnectionAbortedError("the driver says that it has ended")
            self._admitted[reader] = connection

    def withdrawn(self, reader: int) -> bool:
        """Whether the driver has withdrawn a reader."""
        return reader in self._withdrawn

    def send(self, connection: socket.socket, bucket: Bucket, used: int) -> None:
        """Send a bucket's bytes."""
        connection.sendall(_memory(bucket, used))

    def heed(self, control: socket.socket) -> None:
        """Follow the driver's messages about readers, until its connection ends.

        A reader's connection shows the end of its process, but not of its machine, which only the driver notices.
        """
        with contextlib.suppress(OSError, EOFError):
            while True:
                said: dict[str, Any] = receive(control)
                with self._lock:
                    self._withdrawn.add(said["reader"])
                    if said["lost"]:
                        self._lost.add(said["reader"])
                        if (connection := self._admitted.get(said["reader"])) is not None:
                            _shut(connection)


class _ReaderEnd:
    """A :class:`~anytron.workers.weights.buckets.ReaderEnd`: what has not been read yet waits in the connection."""

    def __init__(self, connection: socket.socket, bucket: Bucket) -> None:
        self.connection = connection
        self._bucket = bucket

    def admitted(self) -> None:
        """Do nothing: no bucket is shared."""

    def receive(self, number: int, used: int) -> Bucket:
        """Read a bucket's bytes."""
        del number
        receive_into(self.connection, _memory(self._bucket, used))
        return self._bucket


def _listening(address: str) -> socket.socket:
    """Listen at a free port of one address.

    Raises:
        TransferError: This machine does not have the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise TransferError(
            "Could not listen for the weight transfer at this machine's address.",
            where=address,
            why=str(error),
            fix="start Ray on this machine with one of its addresses (ray start --node-ip-address=ADDRESS), or set "
            "rollout.weights=file",
        ) from error


def _name(listener: socket.socket) -> tuple[str, int]:
    address, port = listener.getsockname()[:2]
    return address, port


def _connected(called: tuple[str, int], timeout_s: float, secret: bytes, purpose: str) -> socket.socket:
    """Connect to a listener that knows the secret.

    Raises:
        TransferError: No such listener can be reached.
    """
    where = f"{called[0]} port {called[1]}"
    try:
        connection = socket.create_connection(called, min(timeout_s, CONNECTED_S))
    except OSError as error:
        raise exhausted(error, where) or TransferError(
            "Could not open a connection for the weight transfer.",
            where=where,
            why=str(error),
            fix="allow connections between the machines on all ports, or set rollout.weights=file",
        ) from error
    try:
        prove_to_called(connection, secret, purpose, timeout_s)
        connection.settimeout(timeout_s)
    except (OSError, EOFError) as error:
        connection.close()
        raise TransferError(
            "A transfer of weights could not be authenticated.",
            where=where,
            why=str(error),
            fix="if this happens again, set rollout.weights=file",
        ) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _memory(bucket: Bucket, used: int) -> memoryview:
    return bucket.data[:used].numpy().data


def _shut(connection: socket.socket) -> None:
    """Shut down a connection from which another thread may be reading."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
