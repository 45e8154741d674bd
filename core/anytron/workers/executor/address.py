"""Stores of ``torch.distributed``, in which the ranks of a group meet."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from anytron.base.errors import WorkerError
from anytron.base.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEME = "anytron"
"""Scheme of the ``init_method`` of ranks on several machines. torch's ``tcp`` listens on all addresses of a machine."""
WAITING = 4096
"""Connections that may wait to be accepted: all ranks connect at once. The kernel lowers it to ``somaxconn``."""


class Stores:
    """Makes stores, in which the ranks of a process group find each other.

    Ranks on one machine meet in nameless files in memory, because any process that reaches a port could use a store
    that listens on it. Only processes of this user can open these files, through this process's entry in /proc, and no
    file remains, however the processes end. Ranks on several machines meet at a port of one address of rank 0's
    machine.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def new(self, address: str | None = None) -> str:
        """Make an empty store; return the ``init_method`` of ``torch.distributed.init_process_group``.

        Earlier stores stay open, because a process group writes into its store as it ends, through a path that names
        the descriptor.

        Args:
            address: Address at which other machines reach this machine; None = all ranks are on this machine.

        Raises:
            WorkerError: This machine does not have the address.
            ResourceError: No file descriptor, or no memory, is left.
            OSError: The system does not allow files in memory.
        """
        if address is None:
            try:
                self._descriptors.append(os.memfd_create("anytron-store"))
            except OSError as error:
                if (explained := exhausted(error, "a store in memory, in which ranks meet")) is not None:
                    raise explained from error
                raise
            return f"file:///proc/{os.getpid()}/fd/{self._descriptors[-1]}"
        try:
            held = _bound(address, 0)
        except OSError as error:
            raise exhausted(error, address) or WorkerError(
                f"This machine cannot listen at {address}, where ranks on other machines would connect.",
                where=socket.gethostname(),
                why=str(error),
                fix="start Ray on this machine with one of its addresses: ray start --node-ip-address=ADDRESS",
            ) from error
        port = held.getsockname()[1]
        self._descriptors.append(held.detach())
        return f"{SCHEME}://{f'[{address}]' if ':' in address else address}:{port}"

    def close(self) -> None:
        """Close the stores, when their ranks have ended."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def register() -> None:
    """Register the ``init_method`` of :meth:`Stores.new` with ``torch.distributed`` in this process."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(SCHEME, _meet)


def _meet(url: str, **settings: Any) -> Iterator[tuple[Any, int, int]]:
    """Handle a rendezvous for ``torch.distributed.rendezvous``: yield the store, this rank, and the number of ranks.

    Args:
        url: The ``init_method``, with rank and number of ranks in its query.
        settings: Settings of the store: ``timeout``.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # of torch's C++

    place = urlsplit(url)
    rank, ranks = (int(parse_qs(place.query)[name][0]) for name in ("rank", "world_size"))
    assert place.hostname is not None
    assert place.port is not None
    where = (place.hostname, place.port)
    if rank == 0:
        listener = _bound(*where)
        listener.listen(WAITING)
        settings["master_listen_fd"] = listener.detach()  # the store closes it
    settings["use_libuv"] = os.environ.get("USE_LIBUV", "1") == "1"  # as torch's own handlers do
    yield TCPStore(*where, ranks, rank == 0, **settings), rank, ranks


def _bound(address: str, port: int) -> socket.socket:
    """Bind a socket to a port of one address; port 0 = a free port.

    Only processes of this user can bind the same port too, and only with SO_REUSEPORT as here. So rank 0 can bind the
    port that the driver has chosen and keeps bound.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind((address, port))
    except OSError:
        taken.close()
        raise
    return taken
