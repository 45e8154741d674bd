"""The client through which an environment of verifiers calls the model. Imports verifiers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import verifiers as vf
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from anytron.base.errors import DataError
from anytron_verifiers.messages import found_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.task.environments import Turn
    from anytron_verifiers.messages import ToolCallFormat


@dataclass(frozen=True)
class Request:
    """A request of an environment to the model.

    Attributes:
        messages: The conversation so far.
        tools: The tools that the model may call.
    """

    messages: Sequence[Any]
    tools: Sequence[Any]


class TurnClient(vf.Client):  # type: ignore[misc]  # verifiers is not installed where types are checked
    """Passes on the requests of an environment during one response, and waits for each turn of the model.

    Args:
        tool_calls: Function that finds the tool calls in a turn.

    Attributes:
        failure: The error that ``tool_calls`` has raised; None if it has raised none.
    """

    def __init__(self, tool_calls: ToolCallFormat) -> None:
        super().__init__(None)
        self._tool_calls = tool_calls
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._turns: asyncio.Queue[Turn | None] = asyncio.Queue()
        self._answered = 0
        self.failure: DataError | None = None

    async def request(self) -> Request:
        """Wait for the next request of the environment."""
        return await self._requests.get()

    def answer(self, turn: Turn | None) -> None:
        """Answer the request with the next turn of the model; None = the response has reached its limit of turns."""
        self._turns.put_nowait(turn)

    async def get_native_response(
        self, prompt: Sequence[Any], _model: str, _sampling: Any, tools: Sequence[Any] | None = None, **_state: Any
    ) -> tuple[Turn, bool]:
        """Ask the model for its next turn.

        Returns:
            The turn, and whether it may contain tool calls.

        Raises:
            OverlongPromptError: There are no further turns. The environment then ends and scores the turns so far.
        """
        self._requests.put_nowait(Request(prompt, tools or ()))
        turn = await self._turns.get()
        if turn is None:
            raise vf.OverlongPromptError
        return turn, bool(tools)

    async def from_native_response(self, response: tuple[Turn, bool]) -> Response:
        """Convert a turn to the response of a server, without the number of prompt tokens, which is unknown here."""
        turn, may_call = response
        content, found = self._found_in(turn.text) if may_call else (turn.text, ())
        self._answered += 1
        calls = [
            ToolCall(id=f"call-{self._answered}-{place}", name=name, arguments=arguments)
            for place, (name, arguments) in enumerate(found, start=1)
        ]
        reason = "tool_calls" if calls else "stop"
        count = len(turn.tokens)
        return Response(
            id=f"turn-{self._answered}",
            created=0,
            model="anytron",
            usage=Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=count, total_tokens=count),
            message=ResponseMessage(
                content=content,
                tool_calls=calls or None,
                finish_reason=reason if turn.finished else "length",
                is_truncated=not turn.finished,
            ),
        )

    def _found_in(self, text: str) -> tuple[str, Sequence[tuple[str, str]]]:
        try:
            return found_in(text, self._tool_calls)
        except DataError as error:
            self.failure = error  # the environment may make another error of it
            raise

    async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return messages unchanged."""
        return messages, {}

    async def to_native_tool(self, tool: Any) -> Any:
        """Return a tool unchanged."""
        return tool

    async def raise_from_native_response(self, _response: tuple[Turn, bool]) -> None:
        """Accept every turn: scoring is left to the rubric."""

    def setup_client(self, _config: Any) -> Any:
        """Raise NotImplementedError: there is no server to connect to."""
        raise NotImplementedError

    async def close(self) -> None:
        """Do nothing: there is no connection to close."""
