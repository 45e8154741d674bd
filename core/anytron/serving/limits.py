"""Limits of the server, so that no client can take its memory or hold up others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What clients may ask of the server.

    Attributes:
        body_bytes: Bytes of a request's body.
        body_s: Seconds in which a body must arrive.
        headers_s: Seconds in which the first line and the headers of a request must arrive.
        connections: Open connections. One more closes the oldest connection on which no request is being answered.
        requests: Requests that are read or answered at the same time.
        answers: Answers to one request (``n``).
        sessions: Sessions that are kept.
        session_bytes: Bytes that a session holds: what it has recorded, and its requests that are being answered.
        memory_bytes: Bytes that all clients hold together, without sessions of a run.
        pixels: Pixels of the new images of a request: decoding and resizing take 20 bytes for each.
    """

    body_bytes: int = 16 << 20
    body_s: float = 30.0
    headers_s: float = 10.0
    connections: int = 512
    requests: int = 256
    answers: int = 16
    sessions: int = 4096
    session_bytes: int = 256 << 20
    memory_bytes: int = 4 << 30
    pixels: int = 1 << 24
