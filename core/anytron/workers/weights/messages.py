"""Messages between the two ends of a weight transfer, and how the ends prove that they know its secret.

A message is sent over a socket as its length, followed by JSON.

Each end answers a random challenge of the other with an HMAC of both challenges. The calling side answers first; the
listening side does not answer a caller that does not know the secret. Proofs have fixed sizes, so that no data of an
unauthenticated peer are parsed. ``multiprocessing.connection`` does the same, but with MD5 before Python 3.12, and
without a time limit. Later data on the connection are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

SECRET_BYTES = 32
_CHALLENGE_BYTES = 32
CALLER_BYTES = _CHALLENGE_BYTES + hashlib.sha256().digest_size
"""Size of a caller's answer: its own challenge, then its proof."""


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. Raises OSError if the other end has closed the connection, or does not read."""
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(8, "big") + text)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for a message.

    Raises:
        EOFError: The connection was closed.
        OSError: The connection is broken, or no message came in time.
    """
    size = int.from_bytes(receive_bytes(connection, 8), "big")
    message: dict[str, Any] = json.loads(receive_bytes(connection, size))
    return message


def receive_bytes(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Wait for ``size`` bytes and return them. Other arguments and exceptions as for :func:`receive_into`."""
    data = bytearray(size)
    receive_into(connection, memoryview(data), deadline)
    return data


def receive_into(connection: socket.socket, data: memoryview, deadline: float | None = None) -> None:
    """Wait until memory is filled. Raises as :func:`receive` does.

    Args:
        connection: Socket with a time-out, which starts again whenever data arrive, unless there is a deadline.
        data: The memory.
        deadline: Time by which all data must have arrived, on the clock of :func:`time.monotonic`.
    """
    while data:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise TimeoutError("the other end took too long")
            connection.settimeout(left_s)
        count = connection.recv_into(data)
        if not count:
            raise EOFError("the connection was closed")
        data = data[count:]


def new_secret() -> bytes:
    """Draw a random secret, for one transfer."""
    return secrets.token_bytes(SECRET_BYTES)


class Challenge:
    """The first message of the listening side, and the check of the caller's answer.

    Args:
        secret: The secret that both sides must know.
        purpose: Purpose of the connection, which must be the same on both sides.

    Attributes:
        text: Text to send to the caller. It is random, so that an old proof is not valid again.
    """

    def __init__(self, secret: bytes, purpose: str) -> None:
        self.text = secrets.token_bytes(_CHALLENGE_BYTES)
        self._secret, self._purpose = secret, purpose

    def answer(self, said: bytes) -> bytes:
        """Check the answer of a caller, :data:`CALLER_BYTES` long; return the proof for the caller.

        Raises:
            PermissionError: The caller does not know the secret, or connects for another purpose.
        """
        theirs, proof = said[:_CHALLENGE_BYTES], said[_CHALLENGE_BYTES:]
        _check(proof, self._secret, f"{self._purpose}: caller", self.text + theirs)
        return _proof(self._secret, f"{self._purpose}: called", self.text + theirs)


def prove_to_called(connection: socket.socket, secret: bytes, purpose: str, timeout_s: float) -> None:
    """Authenticate a connection as the calling side.

    Args:
        connection: The new connection; afterwards it has no time-out.
        secret: The secret that both sides must know.
        purpose: Purpose of the connection, which must be the same on both sides.
        timeout_s: Seconds that the whole authentication may take.

    Raises:
        EOFError: The listening side has closed the connection.
        OSError: The listener does not know the secret or takes too long, or the connection is broken.
    """
    deadline = time.monotonic() + timeout_s
    theirs = bytes(receive_bytes(connection, _CHALLENGE_BYTES, deadline))
    mine = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(mine + _proof(secret, f"{purpose}: caller", theirs + mine))
    proof = receive_bytes(connection, hashlib.sha256().digest_size, deadline)
    _check(proof, secret, f"{purpose}: called", theirs + mine)


def _proof(secret: bytes, side: str, challenges: bytes) -> bytes:
    return hmac.digest(secret, side.encode() + challenges, "sha256")


def _check(proof: bytes | bytearray, secret: bytes, side: str, challenges: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(secret, side, challenges)):
        raise PermissionError("the other end does not know the secret of this transfer")
