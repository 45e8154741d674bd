"""Where the processes of this machine meet."""

from __future__ import annotations

import socket

ADDRESS = "127.0.0.1"


def free_port() -> int:
    """Pick a port that nothing listens on at this moment, for ``torch.distributed``'s store."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])
