"""Two ends of a connection prove to each other that they know a secret, without saying it.

Each answers a random challenge of the other with an HMAC of both challenges. The side that was called is told first,
and says nothing to one that does not know the secret. Messages have fixed sizes: nothing that a stranger sends is
parsed. ``multiprocessing.connection`` does the same with MD5 before Python 3.12, and without a limit of time.

What goes over the connection afterwards is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

from anytron.engines.weight_messages import receive_bytes

if TYPE_CHECKING:
    import socket

SECRET_BYTES = 32
_CHALLENGE_BYTES = 32


def new_secret() -> bytes:
    """Make a secret."""
    return secrets.token_bytes(SECRET_BYTES)


def prove_to_caller(connection: socket.socket, secret: bytes, purpose: str) -> None:
    """Authenticate a connection as the side that was called.

    Args:
        connection: Just accepted; with a time-out.
        secret: What both must know.
        purpose: What the connection is for: both must mean the same.

    Raises:
        EOFError: The caller has left.
        OSError: It does not know the secret, says nothing, or the connection is broken.
    """
    mine = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(mine)
    theirs = bytes(receive_bytes(connection, _CHALLENGE_BYTES))
    _check(receive_bytes(connection, hashlib.sha256().digest_size), secret, f"{purpose}: caller", mine + theirs)
    connection.sendall(_proof(secret, f"{purpose}: called", mine + theirs))


def prove_to_called(connection: socket.socket, secret: bytes, purpose: str) -> None:
    """Authenticate a connection as the side that calls; as :func:`prove_to_caller`."""
    theirs = bytes(receive_bytes(connection, _CHALLENGE_BYTES))
    mine = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(mine + _proof(secret, f"{purpose}: caller", theirs + mine))
    _check(receive_bytes(connection, hashlib.sha256().digest_size), secret, f"{purpose}: called", theirs + mine)


def _proof(secret: bytes, side: str, challenges: bytes) -> bytes:
    return hmac.digest(secret, side.encode() + challenges, "sha256")


def _check(proof: bytearray, secret: bytes, side: str, challenges: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(secret, side, challenges)):
        raise PermissionError("the other end does not know the secret of this transfer")
