"""How many bytes clients hold: requests that are being answered, and what sessions have recorded.

The numbers are upper bounds of what Python needs, so that the limits hold however requests are made. A session of a run
counts in its own limit alone: a run has as many as processes of agents, and other clients cannot use up their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.serving.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anytron.serving.limits import Limits
    from anytron.serving.sessions import Session
    from anytron.task.data.images import ImagePatches

REQUEST = 1 << 16
"""Bytes of a request that is being answered, besides what it says."""
LETTER = 8
"""Bytes for a byte of a body: the body, its text (4 bytes for each character if there is one emoji) and copies."""
NODE = 128
"""Bytes of an object in parsed JSON; each has a comma, a colon or a bracket before it."""
TOKEN = 64
"""Bytes of a token id in a tuple, and of the text that it stands for."""


def bytes_of_objects(body: bytes) -> int:
    """Bytes of the objects in a JSON text, at most, besides their letters."""
    return NODE * sum(map(body.count, (b",", b":", b"[", b"{")))


def bytes_of_prompt(tokens: int, images: Iterable[ImagePatches | None]) -> int:
    """Bytes of a prompt while it is being answered: its images are copied twice on their way to the engine."""
    return TOKEN * tokens + 3 * sum(image.nbytes for image in images if image is not None)


class ClientMemory:
    """Counts the bytes that clients hold.

    Args:
        limits: Limits of the server.
        recorded: Function that returns the bytes that sessions have recorded, without those of a run.

    Attributes:
        held: Bytes of requests that are being answered, without those of sessions of a run.
    """

    def __init__(self, limits: Limits, recorded: Callable[[], int]) -> None:
        self._limits, self._recorded = limits, recorded
        self.held = 0

    def check(self, size: int, session: Session | None, own: int = 0) -> None:
        """Refuse to hold more bytes than the limits allow.

        Args:
            size: The further bytes.
            session: The session that holds them.
            own: Bytes that the same request holds already.

        Raises:
            Refusal: The session, or all clients together, would hold too many.
        """
        if session is not None:
            most = self._limits.session_bytes
            if session.recorded + own + size > most:
                why = f"a session holds {most >> 20} MiB at most (rollout.endpoint_limits.session_mib)"
                raise Refusal(403, "session_full", f"The session is full: {why}; begin another session.")
            if session.recorded + session.in_progress + size > most:
                why = f"a session holds {most >> 20} MiB at most, with requests that are being answered"
                raise Refusal(429, "session_busy", f"The session's requests need too much memory: {why}; ask again.")
            if session.terms is not None:
                return
        most = self._limits.memory_bytes
        if self.held + self._recorded() + size > most:
            why = f"clients hold {most >> 20} MiB at most (rollout.endpoint_limits.memory_mib)"
            raise Refusal(429, "server_full", f"The server's memory is full: {why}; delete sessions or ask again.")


class Hold:
    """The bytes that one request holds until it is answered.

    Args:
        memory: Where they are counted.
        session: The session of the request's key.
    """

    def __init__(self, memory: ClientMemory, session: Session | None) -> None:
        self._memory, self._session, self._size = memory, session, 0

    def add(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            Refusal: They are too many.
        """
        self._memory.check(size, self._session, self._size)
        self._count(size)

    def move(self, session: Session) -> None:
        """Count the bytes for a session that the request names.

        Raises:
            Refusal: They are too many for the session.
        """
        size = self._size
        self.close()
        self._session = session
        self.add(size)

    def close(self) -> None:
        """Release all bytes."""
        self._count(-self._size)

    def _count(self, size: int) -> None:
        self._size += size
        if self._session is not None:
            self._session.in_progress += size
        if self._session is None or self._session.terms is None:
            self._memory.held += size
