"""Serve an application with uvicorn in a thread, on an address that is bound before."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
from collections import OrderedDict
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from anytron.base.errors import ConfigError, WorkerError
from anytron.base.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette

    from anytron.serving.limits import Limits

ENDING_S = 5
"""Seconds in which answers may be sent when the server ends."""
BACKLOG = 512
ANSWER_S = 60.0
"""Seconds within which the server's thread must run a function that another thread passes to :meth:`Server.call`."""
Found = TypeVar("Found")


def bind(host: str, port: int, named: tuple[str, str] = ("--host ", "--port ")) -> socket.socket:
    """Take the server's address: no other program can, and connections wait until the server is started.

    Args:
        host: Name or address of an interface of this machine.
        port: TCP port; 0 = a free one.
        named: How the user sets host and port, for errors.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        if (known := exhausted(error)) is not None:
            raise known from error
        fix = f"choose another port: {named[1]}0 takes a free one"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            fix = f"name an address of this machine, for example {named[0]}127.0.0.1; 'ip address' lists them"
        raise ConfigError(
            "The server cannot listen at this address.", where=f"{host}:{port}", why=str(error), fix=fix
        ) from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Whether only programs on this machine reach the address."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    """Return the URL that clients use."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class Server:
    """Serves an application in a thread, from :meth:`start` to :meth:`stop`.

    Args:
        app: The application.
        bound: The address.
        limits: Limits of connections and headers.

    """

    def __init__(self, app: Starlette, bound: socket.socket, limits: Limits) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        open_connections: OrderedDict[_Connection, None] = OrderedDict()

        def connect(*arguments: Any, **named: Any) -> _Connection:
            return _Connection(open_connections, limits, *arguments, **named)

        config = uvicorn.Config(
            app, http=connect, loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False,  # type: ignore[arg-type]
            server_header=False, proxy_headers=False, backlog=BACKLOG, timeout_graceful_shutdown=ENDING_S,
        )  # fmt: skip
        self._server, self._bound = uvicorn.Server(config), bound
        self._url = url_of(bound)
        self._failure: BaseException | None = None
        self._loop: futures.Future[asyncio.AbstractEventLoop] = futures.Future()
        self._thread = threading.Thread(target=self._run, name="anytron-serve", daemon=True)

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def check(self) -> None:
        """Check that the server answers.

        Raises:
            WorkerError: The server's thread has ended.
        """
        if not self._thread.is_alive():
            raise WorkerError(
                "The server has ended by itself.",
                where=self._url,
                why=f"its thread failed: {self._failure!r}",
                fix="start it again; if it ends again, report this as a bug of Anytron",
            ) from self._failure

    def call(self, function: Callable[[], Found]) -> Found:
        """Run a function in the server's thread, which alone uses sessions while the server answers.

        Raises:
            WorkerError: The server has ended, or does not answer.
        """
        found: futures.Future[Found] = futures.Future()

        def run() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                found.set_exception(error)

        try:
            self._loop.result(ANSWER_S).call_soon_threadsafe(run)
        except (RuntimeError, futures.TimeoutError):  # the loop is closed, or has not begun
            self.check()
            raise
        try:
            return found.result(ANSWER_S)
        except futures.TimeoutError as error:
            found.cancel()
            self.check()
            why = f"its thread did not run a function of the main thread within {ANSWER_S:g} s"
            fix = "let fewer clients ask at the same time, or report this as a bug of Anytron"
            raise WorkerError("The server does not answer.", where=self._url, why=why, fix=fix) from error

    def stop(self) -> None:
        """Accept no more connections, let answers be sent, and end the thread."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(ENDING_S + 5)
        self._bound.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._failure = error

    async def _serve(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._server.serve([self._bound])


class _Connection(H11Protocol):
    """A connection whose requests must begin in time, and that gives way if there are too many.

    uvicorn alone waits for ever for the headers of a request, and refuses everybody if there are too many connections.
    """

    def __init__(self, others: OrderedDict[_Connection, None], limits: Limits, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._others, self._limits = others, limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers; close the oldest connection that waits if there are too many."""
        super().connection_made(transport)
        self._others[self] = None
        self._wait()
        if len(self._others) > self._limits.connections:
            oldest = next((one for one in self._others if not one.answering), self)
            oldest.give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._others.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to wait for the headers of the next request."""
        super().on_response_complete()
        self._wait()

    @property
    def answering(self) -> bool:
        """Whether the headers of a request have arrived, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def give_up(self) -> None:
        """Close the connection at once."""
        self._others.pop(self, None)
        if not self.transport.is_closing():
            self.transport.abort()

    def _wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self._limits.headers_s, self._late)

    def _late(self) -> None:
        if not self.answering and self.conn.their_state is not h11.CLOSED:
            self.give_up()
