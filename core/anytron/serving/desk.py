"""Between the server, which runs on an event loop, and the rollout engines, which the main thread polls."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anytron.serving.refusal import Refusal
from anytron.workers.engines.rollout_engine import PromptInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from anytron.task.data.images import ImagePatches
    from anytron.workers.engines.rollout_engine import Response, SamplingParams

ENDED = "The server ends, and answers no more requests."


class Pool(Protocol):
    """Generates responses; :class:`anytron.run.rollout.pool.RolloutPool` is one."""

    def ask(
        self,
        questions: Sequence[tuple[PromptInputs, SamplingParams, int]],
        answered: Callable[[int, Response], None],
    ) -> list[int]:
        """Ask for a response to each (prompt, sampling parameters, seed); return the request numbers.

        ``answered`` is called with number and response of each request when it has finished, in the thread that polls.
        """

    def poll(self, seconds: float) -> list[tuple[int, Response]]:
        """Generate for about ``seconds``; return number and response of requests asked without ``answered``."""

    def cancel(self, numbers: Collection[int]) -> None:
        """Give requests up: they are never returned."""


@dataclass(frozen=True, eq=False)
class _Ticket:
    question: tuple[PromptInputs, SamplingParams, int]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Response]

    def tell(self, response: Response | Refusal) -> None:
        """Give the answer to the event loop, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: its server has ended, and no client waits
            self.loop.call_soon_threadsafe(self._set, response)

    def _set(self, response: Response | Refusal) -> None:
        if self.answer.done():  # its client is gone
            return
        if isinstance(response, Refusal):
            self.answer.set_exception(response)
        else:
            self.answer.set_result(response)


class Desk:
    """Takes questions from the event loop and answers from the pool; each side has its own thread."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[_Ticket, bool]] = queue.SimpleQueue()
        self._open: dict[int, _Ticket] = {}
        self._closing = threading.Lock()
        self._closed = False

    async def answer(
        self, tokens: Sequence[int], sampling: SamplingParams, seed: int, images: ImagePatches | None = None
    ) -> Response:
        """Wait for a response. If the caller is cancelled, so is the request.

        Args:
            tokens: Token ids of the prompt.
            sampling: Sampling parameters.
            seed: Seed of the response.
            images: The prompt's images.

        Raises:
            Refusal: The desk is closed.
        """
        loop = asyncio.get_running_loop()
        ticket = _Ticket((PromptInputs(tuple(tokens), images), sampling, seed), loop, loop.create_future())
        with self._closing:
            if self._closed:
                raise Refusal(503, "server_ends", ENDED)
            self._arrived.put((ticket, True))
        try:
            return await ticket.answer
        except asyncio.CancelledError:
            self._arrived.put((ticket, False))
            raise

    @property
    def busy(self) -> bool:
        """Whether the pool works on any question."""
        return bool(self._open)

    def work(self, pool: Pool, seconds: float) -> None:
        """Pass questions to the pool, and its answers back, for about the given time.

        Args:
            pool: The pool, which only this thread uses.
            seconds: Time to wait for a question or an answer; a signal interrupts it.
        """
        self._pass(pool, self._take(0.0 if self._open else seconds))
        if self._open:
            pool.poll(seconds)

    def visit(self, pool: Pool) -> None:
        """Pass the questions that have arrived to a pool that is at work, and cancel requests that clients gave up."""
        self._pass(pool, self._take(0.0))

    def _pass(self, pool: Pool, arrived: Sequence[tuple[_Ticket, bool]]) -> None:
        given_up = [ticket for ticket, wanted in arrived if not wanted]
        asked = [ticket for ticket, wanted in arrived if wanted and ticket not in given_up]
        numbers = pool.ask([ticket.question for ticket in asked], self._answered) if asked else []
        self._open |= dict(zip(numbers, asked, strict=True))
        if dropped := [number for number, ticket in self._open.items() if ticket in given_up]:
            pool.cancel(dropped)
            for number in dropped:
                del self._open[number]

    def _answered(self, number: int, response: Response) -> None:
        self._open.pop(number).tell(response)

    def close(self) -> None:
        """Refuse all requests that are not answered yet, and later ones; the pool is not used any more."""
        with self._closing:
            self._closed = True
        waiting = [ticket for ticket, wanted in self._take(0.0) if wanted]
        for ticket in [*waiting, *self._open.values()]:
            ticket.tell(Refusal(503, "server_ends", ENDED))
        self._open.clear()

    def _take(self, seconds: float) -> list[tuple[_Ticket, bool]]:
        """Take what has arrived; wait for the first if nothing has."""
        taken = []
        try:
            taken.append(self._arrived.get(block=seconds > 0, timeout=seconds or None))
            while True:
                taken.append(self._arrived.get_nowait())
        except queue.Empty:
            return taken
