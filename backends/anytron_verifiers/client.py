"""The model as an environment of verifiers sees it. Imports verifiers."""

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
    """What an environment asks the model.

    Attributes:
        messages: The conversation so far.
        tools: That the model may call.
    """

    messages: Sequence[Any]
    tools: Sequence[Any]


class TurnClient(vf.Client):  # type: ignore[misc]  # verifiers is not installed where types are checked
    """Hands out what an environment asks in one response, and waits for each turn of the model's.

    Args:
        tool_calls: Finds them in a turn.

    Attributes:
        failure: The error of ``tool_calls``, once it has failed; None before.
    """

    def __init__(self, tool_calls: ToolCallFormat) -> None:
        super().__init__(None)
        self._tool_calls = tool_calls
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._turns: asyncio.Queue[Turn | None] = asyncio.Queue()
        self._answered = 0
        self.failure: DataError | None = None

    async def request(self) -> Request:
        """Wait for what the environment asks next."""
        return await self._requests.get()

    def answer(self, turn: Turn | None) -> None:
        """Give the next turn; None if there is none, because the response has had as many as it may have."""
        self._turns.put_nowait(turn)

    async def get_native_response(
        self, prompt: Sequence[Any], _model: str, _sampling: Any, tools: Sequence[Any] | None = None, **_state: Any
    ) -> tuple[Turn, bool]:
        """Ask for a turn.

        Returns:
            It, and whether there may be tool calls in it.

        Raises:
            OverlongPromptError: There is none. The environment ends then, and scores what there is.
        """
        self._requests.put_nowait(Request(prompt, tools or ()))
        turn = await self._turns.get()
        if turn is None:
            raise vf.OverlongPromptError
        return turn, bool(tools)

    async def from_native_response(self, response: tuple[Turn, bool]) -> Response:
        """Make of a turn what a server would answer. How many tokens the prompt had is not known here."""
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
        """Leave messages as they are."""
        return messages, {}

    async def to_native_tool(self, tool: Any) -> Any:
        """Leave tools as they are."""
        return tool

    async def raise_from_native_response(self, _response: tuple[Turn, bool]) -> None:
        """Accept every turn: what it is worth is the rubric's to say."""

    def setup_client(self, _config: Any) -> Any:
        """Refuse: there is no server."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close nothing."""
