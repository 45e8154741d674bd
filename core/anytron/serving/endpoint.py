"""An OpenAI-compatible server over a pool of rollout engines: all its parts, put together."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from anytron.serving.app import Routes
from anytron.serving.desk import Desk
from anytron.serving.keys import Keyring
from anytron.serving.limits import Limits
from anytron.serving.rendering import Renderer
from anytron.serving.server import Server, is_loopback, url_of
from anytron.serving.service import ServedModel, Service

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Any

    from typing_extensions import Self

    from anytron.serving.sessions import Session, Terms


class Endpoint:
    """A server. A context manager: leaving ends it.

    Args:
        model: The model that answers.
        chat_template_kwargs: Further arguments of the chat template.
        key: The server's key.
        bound: The address (:func:`anytron.serving.server.bind`).
        limits: Limits of the server; None = the default.

    Attributes:
        model: The model that answers.
        desk: Passes requests to the pool: the pool calls it (``RolloutPool.guests``), or the main thread does.
        url: Address for clients.
        is_loopback: Whether only programs on this machine reach the address.
        counts: Number of requests by outcome: ``answered``, ``aborted`` (the client left), or the code of the refusal.
    """

    def __init__(
        self,
        model: ServedModel,
        chat_template_kwargs: Mapping[str, Any],
        key: str,
        bound: socket.socket,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self.model, self.desk, self.url, self.is_loopback = model, Desk(), url_of(bound), is_loopback(bound)
        self._keys, self._reported = Keyring(key, limits), Counter[str]()
        with contextlib.ExitStack() as ends:
            ends.callback(bound.close)
            self._renderer = Renderer(
                model.tokenizer, model.vocab_size, chat_template_kwargs, model.vision, limits.pixels
            )
            ends.callback(self._renderer.close)
            self._routes = routes = Routes(Service(model, self._renderer, self.desk, limits), self._keys)
            self.counts: Mapping[str, int] = routes.counts
            self._server = Server(routes.app(), bound, limits)
            ends.callback(self._server.stop)
            ends.callback(self.desk.close)
            self._ends = ends.pop_all()

    def start(self) -> None:
        """Start to answer."""
        self._server.start()

    def check(self) -> None:
        """Raise a WorkerError if the server has ended by itself."""
        self._server.check()

    def begin(self, terms: Terms) -> tuple[Session, str]:
        """Begin a session that a run trains on; return it and its key."""
        return self._server.call(lambda: self._keys.begin(terms))

    def end(self, session: Session) -> None:
        """End a session: its key is no longer admitted, and nothing is added to what it has recorded."""
        self._server.call(lambda: self._keys.delete(session))

    def metrics(self) -> dict[str, float]:
        """Count the requests since the last call, for the metrics of a step."""
        now = Counter(dict(self.counts))
        new, self._reported = now - self._reported, now
        refused = new.total() - new["answered"] - new["aborted"]
        found = {"answered": new["answered"], "refused": refused, "aborted": new["aborted"]}
        return {f"endpoint/{name}": float(count) for name, count in found.items()}

    def close(self) -> None:
        """Answer no more, and end the server."""
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
