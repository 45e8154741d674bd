"""Where the ranks of a group meet: the store of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

from anytron.errors import WorkerError

LOWEST = 10_000
"""Below are the ports of well-known services."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 100


class StoreFiles:
    """Stores of ranks that are on one machine: files in memory, without a name.

    A store that listens on a port lets in whoever reaches it. These are open to processes of this user alone, by way
    of this process's entry in /proc, and leave nothing behind, however the processes end.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def new(self) -> str:
        """Make an empty store; return the ``init_method`` of ``torch.distributed.init_process_group``.

        Earlier ones stay: a process group writes into its store as it ends, through a path that names the descriptor.
        """
        self._descriptors.append(os.memfd_create("anytron-store"))
        return f"file:///proc/{os.getpid()}/fd/{self._descriptors[-1]}"

    def close(self) -> None:
        """Let the stores go. Their ranks have ended."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def free_port() -> int:
    """Pick a port of this machine that nothing listens on, for the store of ranks on several machines.

    Seconds pass until the store listens, on every address of the machine. The kernel gives the ports of its own
    range to whatever connects meanwhile, and gloo connects hundreds of times; so the port is one below that range,
    at random.

    Raises:
        WorkerError: No port is free.
    """
    try:
        highest = int(EPHEMERAL.read_text().split()[0])
    except OSError:
        highest = 32_768  # what Linux has by default
    if highest - LOWEST < ATTEMPTS:  # somebody gave the kernel nearly all of them
        return _bound(0)
    choice = random.SystemRandom()
    for _ in range(ATTEMPTS):
        with contextlib.suppress(OSError):
            return _bound(choice.randrange(LOWEST, highest))
    raise WorkerError(
        "There is no port where the ranks could meet.",
        where=socket.gethostname(),
        why=f"{ATTEMPTS} ports between {LOWEST} and {highest} are all in use",
        fix="end what listens on them (ss --listening --tcp --processes)",
    )


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("", port))  # as the store will: a port that is taken on one address is not free
        return int(probe.getsockname()[1])
