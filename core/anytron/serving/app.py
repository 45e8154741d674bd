"""The routes of the server, as a Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from anytron.serving import answers
from anytron.serving.form import Form, event_of
from anytron.serving.memory import LETTER, REQUEST, ClientMemory, Hold, bytes_of_objects
from anytron.serving.refusal import Refusal
from anytron.serving.requests import ChatBody, CompletionBody, RewardBody, TokensBody, read
from anytron.serving.sessions import Reward

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from anytron.serving.keys import Keyring
    from anytron.serving.requests import Common
    from anytron.serving.service import Asked, Service
    from anytron.serving.sessions import Session

Body = TypeVar("Body", ChatBody, CompletionBody, TokensBody)
SHOWN = 512
"""Bytes for a recorded token while a session is shown."""
EARLY = frozenset({401, 403, 408, 413, 429, 503})
"""Statuses that are answered before the whole body has arrived: the connection is closed, and the rest is not read."""


class Routes:
    """Answers HTTP requests.

    Args:
        service: Answers what the requests ask.
        keys: Keys and sessions.

    Attributes:
        counts: Number of requests by outcome: ``answered``, ``aborted`` (the client left), or the code of the refusal.
    """

    def __init__(self, service: Service, keys: Keyring) -> None:
        self._service, self._keys = service, keys
        self._limits = service.limits
        self._memory = ClientMemory(service.limits, keys.recorded)
        self._busy = 0
        self.counts: Counter[str] = Counter()

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/v1/models", self._handled(self._models, place=False)),
                Route("/v1/chat/completions", self._handled(self._chat), methods=["POST"]),
                Route("/v1/completions", self._handled(self._completion), methods=["POST"]),
                Route("/inference/v1/generate", self._handled(self._tokens), methods=["POST"]),
                Route("/v1/reward", self._handled(self._reward), methods=["POST"]),
                Route("/v1/sessions", self._handled(self._begin), methods=["POST"]),
                Route("/v1/sessions/{name}", self._handled(self._show)),
                Route("/v1/sessions/{name}", self._handled(self._delete, place=False), methods=["DELETE"]),
            ],
            middleware=[Middleware(_Admission, routes=self)],
            exception_handlers={HTTPException: _http_error, Exception: _bug},
        )

    def admit(self, headers: Headers) -> Session | None:
        """Check the key of a request, whatever it asks; return the key's session, None for the server's key.

        Raises:
            Refusal: The key is missing or wrong.
        """
        try:
            return self._keys.admit(headers.get("authorization"))
        except Refusal as refusal:
            self._count(refusal.code, None)
            raise

    def hold(self, session: Session | None) -> Hold:
        """Begin to count what a request holds, until the end of its answer.

        Raises:
            Refusal: Clients hold too much.
        """
        hold = Hold(self._memory, session)
        try:
            hold.add(REQUEST)
        except Refusal as refusal:
            self._count(refusal.code, session)
            raise
        return hold

    def _handled(
        self, handler: Callable[[Request, Session | None], Awaitable[Response]], *, place: bool = True
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Turn refusals of a handler into answers; ``place``: whether the limit of requests counts it."""

        async def handle(request: Request) -> Response:
            try:
                with self._place(request.state.session) if place else contextlib.nullcontext():
                    return await handler(request, request.state.session)
            except Refusal as refusal:
                self._count(refusal.code, request.state.session)
                return _refused(refusal)

        return handle

    async def _asked(self, request: Request, session: Session | None, kind: type[Body]) -> tuple[Body, Session | None]:
        """Read the body of a request to generate, and find its session: the key's, or what the server's key names."""
        body = read(await self._body(request), kind)
        name = request.headers.get("x-session-id")
        if session is None and name is not None:
            request.state.session = session = self._keys.named(name)
            request.state.hold.move(session)
        return body, session

    async def _models(self, request: Request, session: Session | None) -> Response:
        del request, session
        model = self._service.model
        context = {} if model.context is None else {"max_model_len": model.context}
        one = {"id": model.name, "object": "model", "created": 0, "owned_by": "anytron", **context}
        return JSONResponse({"object": "list", "data": [one]})

    async def _begin(self, request: Request, session: Session | None) -> Response:
        await self._body(request)
        self._keys.require_server_key(session)
        begun, key = self._keys.begin()
        return JSONResponse({"id": begun.id, "key": key}, status_code=201)

    async def _reward(self, request: Request, session: Session | None) -> Response:
        body = read(await self._body(request), RewardBody)
        if session is None:
            why = "the server's key belongs to none; send the request with the session's key"
            raise Refusal(400, "no_session", f"A reward belongs to a session, and {why}.")
        session.reward = Reward(body.reward, body.metrics)
        return JSONResponse({"id": session.id})

    async def _show(self, request: Request, session: Session | None) -> Response:
        shown = self._keys.visible(request.path_params["name"], session)
        request.state.hold.add(SHOWN * shown.size)
        known = (shown.id, dict(shown.counts), list(shown.turns), shown.reward)
        # In a thread: other requests are answered while millions of tokens are written.
        return await asyncio.to_thread(lambda: JSONResponse(answers.session_answer(*known)))

    async def _delete(self, request: Request, session: Session | None) -> Response:
        self._keys.delete(self._keys.visible(request.path_params["name"], session))
        return JSONResponse({"deleted": True})

    async def _chat(self, request: Request, session: Session | None) -> Response:
        body, session = await self._asked(request, session, ChatBody)
        tools = bool(body.tools) and body.tool_choice != "none"
        return await self._generated(
            request, session, body, lambda: self._service.chat(body, session), Form(self._service, body), tools=tools
        )

    async def _completion(self, request: Request, session: Session | None) -> Response:
        body, session = await self._asked(request, session, CompletionBody)
        return await self._generated(
            request,
            session,
            body,
            lambda: self._service.completion(body, session),
            Form(self._service, body),
            tools=False,
        )

    async def _tokens(self, request: Request, session: Session | None) -> Response:
        body, session = await self._asked(request, session, TokensBody)

        async def answer() -> Response:
            asked = self._service.tokens(body, session)
            request.state.hold.add(asked.size(1))
            (one,) = await self._service.answers(asked, 1, tools=False)
            return JSONResponse(answers.tokens_answer(one.response))

        return await self._while_connected(request, answer())

    async def _generated(
        self,
        request: Request,
        session: Session | None,
        body: Common,
        ask: Callable[[], Awaitable[Asked]],
        form: Form,
        *,
        tools: bool,
    ) -> Response:
        """Answer a request for text: whole, or as a stream."""

        async def held() -> Asked:
            asked = await ask()
            request.state.hold.add(asked.size(body.n or 1))
            return asked

        async def answer() -> Response:
            asked = await held()
            return JSONResponse(form.whole(asked, await self._service.answers(asked, body.n or 1, tools=tools)))

        if not body.stream:
            return await self._while_connected(request, answer())
        asked = await held()
        return StreamingResponse(self._streamed(asked, session, form, tools=tools), media_type="text/event-stream")

    async def _streamed(self, asked: Asked, session: Session | None, form: Form, *, tools: bool) -> AsyncIterator[str]:
        """Yield the events of a stream. A refusal after the beginning is an event, too."""
        try:
            with self._place(session):
                async for text, part, whole in self._service.stream(asked, tools=tools):
                    yield form.chunk(asked, text, part, whole)
                    if whole is not None and form.body.usage:
                        yield form.usage_chunk(asked, whole)
            self._count("answered", None)
        except Refusal as refusal:
            self._count(refusal.code, session)
            yield event_of(refusal.body)
        except (asyncio.CancelledError, GeneratorExit):
            self._count("aborted", session)
            raise
        yield "data: [DONE]\n\n"

    async def _while_connected(self, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """Wait for an answer; give it up if the client leaves."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Refusal(499, "aborted", "The client left.")
            answer = await working
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
        self._count("answered", None)
        return answer

    @contextlib.contextmanager
    def _place(self, session: Session | None) -> Iterator[None]:
        """Take one of the places for requests that are answered at the same time; agents of a run need none."""
        if session is not None and session.terms is not None:
            yield
            return
        if self._busy >= self._limits.requests:
            most = f"{self._limits.requests} requests are being answered"
            raise Refusal(503, "busy", f"The server is busy: {most}; ask again later.")
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def _body(self, request: Request) -> bytes:
        """Read the body of a request, within the limits of size and time."""
        try:
            return await asyncio.wait_for(self._whole(request), self._limits.body_s)
        except asyncio.TimeoutError:
            why = f"it must arrive within {self._limits.body_s:g} s"
            raise Refusal(408, "too_slow", f"The body of the request is incomplete: {why}.") from None

    async def _whole(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._limits.body_bytes:
                most = f"more than {self._limits.body_bytes} bytes (rollout.endpoint_limits.request_mib)"
                raise Refusal(413, "too_large", f"The body of the request is too large: it has {most}.")
            request.state.hold.add(LETTER * len(part))
        body = b"".join(parts)
        request.state.hold.add(bytes_of_objects(body))
        return body

    def _count(self, what: str, session: Session | None) -> None:
        self.counts[what] += 1
        if session is not None:
            session.counts[what] += 1


class _Admission:
    """Checks the key of each request before its path and method are looked at."""

    def __init__(self, app: ASGIApp, routes: Routes) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        state = scope.setdefault("state", {})
        hold = None
        try:
            state["session"] = self._routes.admit(Headers(scope=scope))
            state["hold"] = hold = self._routes.hold(state["session"])
        except Refusal as refusal:
            answer = _refused(refusal)
        try:
            await answer(scope, receive, send)
        finally:
            if hold is not None:
                hold.close()


async def _left(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(refusal: Refusal) -> Response:
    headers = {"connection": "close"} if refusal.status in EARLY else {}
    return JSONResponse(refusal.body, refusal.status, {**headers, **refusal.headers})


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a path that does not exist, or that does not take the request's method."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path[:200], request.method
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return _refused(Refusal(405, "method_not_allowed", f"{path} does not accept {method}; use {allowed}."))
    message = f"The server has no route {path}; routes of models begin with /v1/, for example /v1/chat/completions."
    return _refused(Refusal(error.status_code, "no_such_route", message))


async def _bug(request: Request, error: Exception) -> Response:
    """Answer a request that has met a bug of the server: its traceback goes to the server's log alone."""
    del request, error
    return _refused(Refusal(500, "internal_error", "The server has failed on this request; its log says why."))
