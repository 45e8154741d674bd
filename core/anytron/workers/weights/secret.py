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
import time
from typing import TYPE_CHECKING

from anytron.workers.weights.messages import receive_bytes

if TYPE_CHECKING:
    import socket

SECRET_BYTES = 32
_CHALLENGE_BYTES = 32
CALLER_BYTES = _CHALLENGE_BYTES + hashlib.sha256().digest_size
"""What a caller says: its own challenge, and its proof."""


def new_secret() -> bytes:
    """Make a secret."""
    return secrets.token_bytes(SECRET_BYTES)


class Challenge:
    """What the side that was called says first, and answers a caller that knows the secret.

    Args:
        secret: What both must know.
        purpose: What the connection is for: both must mean the same.

    Attributes:
        text: To be sent to the caller. It is random: what proved something once proves nothing again.
    """

    def __init__(self, secret: bytes, purpose: str) -> None:
        self.text = secrets.token_bytes(_CHALLENGE_BYTES)
        self._secret, self._purpose = secret, purpose

    def answer(self, said: bytes) -> bytes:
        """Check what a caller says, :data:`CALLER_BYTES` long; return the proof for it.

        Raises:
            PermissionError: It does not know the secret, or is here for something else.
        """
        theirs, proof = said[:_CHALLENGE_BYTES], said[_CHALLENGE_BYTES:]
        _check(proof, self._secret, f"{self._purpose}: caller", self.text + theirs)
        return _proof(self._secret, f"{self._purpose}: called", self.text + theirs)


def prove_to_called(connection: socket.socket, secret: bytes, purpose: str, timeout_s: float) -> None:
    """Authenticate a connection as the side that calls.

    Args:
        connection: Just made; it has no time-out of its own afterwards.
        secret: As for :class:`Challenge`.
        purpose: As for :class:`Challenge`.
        timeout_s: How long all of it may take.

    Raises:
        EOFError: The called side has left.
        OSError: It does not know the secret, takes too long, or the connection is broken.
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
