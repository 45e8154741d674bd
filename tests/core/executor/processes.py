"""What tests ask the kernel about processes."""

import contextlib
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


def listening(pid):
    """The addresses on which a process accepts TCP connections, as the kernel writes them: hex, in its byte order."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(descriptor.readlink()))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in sockets:
                addresses.add(local.partition(":")[0])
    return addresses


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1, and the former as an address of the latter kind."""
