"""Where processes meet."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from anytron.errors import WorkerError

ADDRESS = "127.0.0.1"
LOWEST = 10_000
"""Below are the ports of well-known services."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 100


def free_port(address: str = ADDRESS) -> int:
    """Pick a port of this machine that nothing listens on, for ``torch.distributed``'s store.

    Seconds pass until the store listens. The kernel gives the ports of its own range to whatever connects
    meanwhile, and gloo connects hundreds of times; so the port is one below that range, at random.

    Args:
        address: The machine's address at which ranks will meet.

    Raises:
        WorkerError: No port is free.
    """
    try:
        highest = int(EPHEMERAL.read_text().split()[0])
    except OSError:
        highest = 32_768  # what Linux has by default
    if highest - LOWEST < ATTEMPTS:  # somebody gave the kernel nearly all of them
        return _bound(address, 0)
    choice = random.SystemRandom()
    for _ in range(ATTEMPTS):
        with contextlib.suppress(OSError):
            return _bound(address, choice.randrange(LOWEST, highest))
    raise WorkerError(
        "There is no port where the ranks could meet.",
        where=address,
        why=f"{ATTEMPTS} ports between {LOWEST} and {highest} are all in use",
        fix="end what listens on them (ss --listening --tcp --processes)",
    )


def _bound(address: str, port: int) -> int:
    with socket.socket() as probe:
        probe.bind((address, port))
        return int(probe.getsockname()[1])
