"""What tests ask the kernel about processes."""

import contextlib
import random
import socket
import struct
import time
from pathlib import Path

LISTENS = "0A"


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def offspring(pid):
    """The children of a process, theirs, and so on."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(grandchild for child in children for grandchild in offspring(child))]


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def listeners(pid):
    """Where a process accepts TCP connections: addresses as people write them, and ports."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(descriptor.readlink()))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in sockets:
                address, _, port = local.partition(":")
                found.add((_written(family, bytes.fromhex(address)), int(port, 16)))
    return found


def _written(family, address):
    words = struct.unpack(f"={len(address) // 4}I", address)  # in the byte order of this machine
    return socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words))


def listening(pid):
    """The addresses on which a process accepts TCP connections."""
    return {address for address, _ in listeners(pid)}


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def free_port():
    """A port that nothing listens on, and that no connection gets: the kernel gives others to these."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", random.SystemRandom().randrange(10_000, end)))
            return probe.getsockname()[1]
