"""Messages between the two ends of a weight transfer: JSON behind its length, over a socket."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. An OSError says that the other end is gone, or does not read."""
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(8, "big") + text)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for a message.

    Raises:
        EOFError: The connection was closed.
        OSError: It is broken, or nothing came in time.
    """
    size = int.from_bytes(receive_bytes(connection, 8), "big")
    message: dict[str, Any] = json.loads(receive_bytes(connection, size))
    return message


def receive_bytes(connection: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Wait for so many bytes. Takes and raises what :func:`receive_into` does."""
    data = bytearray(size)
    receive_into(connection, memoryview(data), deadline)
    return data


def receive_into(connection: socket.socket, data: memoryview, deadline: float | None = None) -> None:
    """Wait until memory is filled. Raises as :func:`receive` does.

    Args:
        connection: With a time-out, which begins anew with whatever comes, or a deadline.
        data: The memory.
        deadline: When all of it must have come, on the clock of :func:`time.monotonic`.
    """
    while data:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise TimeoutError("it took too long")
            connection.settimeout(left_s)
        count = connection.recv_into(data)
        if not count:
            raise EOFError("the connection was closed")
        data = data[count:]
