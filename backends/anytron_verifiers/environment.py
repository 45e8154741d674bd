"""Adapt an environment of verifiers to Anytron: the environment runs its rollout with turns of Anytron's model."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from anytron.config.imports import resolve
from anytron.task.environments import Observation
from anytron_verifiers.messages import FORMATS, TOOL_CALLS, as_function, plain, said, tools_of
from anytron_verifiers.source import load

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from anytron.task.environments import Task, Turn
    from anytron_verifiers.client import Request


@dataclass(frozen=True)
class Loaded:
    """An environment of verifiers, which all responses of a process share.

    Attributes:
        environment: The environment.
        loop: The process's event loop, which runs only while a call is answered.
    """

    environment: Any
    loop: asyncio.AbstractEventLoop


class VerifiersEnvironment:
    """One rollout of an environment of verifiers, driven turn by turn.

    Prompts must come from :func:`anytron_verifiers.prompts` with the same options: their data are rows of the
    environment's dataset.

    Args:
        name: Name of the environment, as for ``verifiers.load_environment``.
        args: Keyword arguments of the environment's ``load_environment``.
        tool_calls: How the model writes tool calls: ``hermes``, or ``module:function`` of a function that finds them
            (:data:`anytron_verifiers.messages.ToolCallFormat`).
    """

    def __init__(self, name: str, args: Mapping[str, Any] | None = None, tool_calls: str = "hermes") -> None:
        self._loaded = _loaded(name, json.dumps(args or {}, sort_keys=True))
        self._tool_calls = resolve(tool_calls, TOOL_CALLS, registered=FORMATS)

    def reset(self, task: Task) -> None:
        """Start the rollout of a row of the dataset.

        Raises:
            ValueError: The environment does not start with the prompt that the model has read.
        """
        from anytron_verifiers.client import TurnClient

        environment, row = self._loaded.environment, dict(task.data)
        self._turns_left = task.max_turns
        self._client = TurnClient(self._tool_calls)
        rollout = environment.run_rollout(row, self._client, "anytron", {"seed": task.seed})
        self._rollout = self._loaded.loop.create_task(rollout)
        with self._cleaned_up():
            request = self._next_request()
            if request is None:
                self._outcome()
                raise ValueError("the environment ended before the model's first turn")
            self._seen, tools = said(request.messages), [as_function(tool) for tool in request.tools]
            given = said(row["prompt"]), tools_of(environment, row)
            if (self._seen, tools) != given:
                raise ValueError(
                    f"the environment did not start with the prompt and the tools that the model was given, {given}, "
                    f"but with {(self._seen, tools)}: the data source and the environment must have the same name and "
                    "args; if they have, the environment changes its prompts and cannot be used"
                )

    def step(self, turn: Turn) -> Observation:
        """Pass a turn of the model to the environment; return its next messages or, at its end, its score.

        Raises:
            ValueError: The environment changed earlier messages, or goes on after the last turn.
            RuntimeError: The environment ended with an error.
        """
        with self._cleaned_up():
            self._turns_left -= 1
            self._client.answer(turn)
            request = self._next_request()
            if request is None:
                return self._outcome()
            before, self._seen = self._seen, said(request.messages)
            begun = self._seen[: len(before) + 1]
            if begun[:-1] != before or begun[-1][0] != "assistant":
                raise ValueError(
                    "the environment changed earlier messages of the conversation, or left out the model's turn: "
                    f"{before} became {begun}; use an environment that only appends messages"
                )
            new = [plain(message) for message in request.messages[len(begun) :]]
            if self._turns_left:
                return Observation(messages=new)
            self._client.answer(None)
            if self._next_request() is not None:
                raise ValueError("the environment goes on after the last turn (environment.max_turns)")
            return replace(self._outcome(), done=False, messages=new)

    def close(self) -> None:
        """Cancel the rollout if it is not over, and let the environment clean up."""
        self._rollout.cancel()
        with suppress(asyncio.CancelledError, Exception):
            self._loaded.loop.run_until_complete(self._rollout)

    @contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Close the rollout if the block raises, because the caller does not close it then."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _next_request(self) -> Request | None:
        """Run the environment until it requests a turn of the model; None = its rollout is over."""
        return self._loaded.loop.run_until_complete(_either(self._rollout, self._client.request()))

    def _outcome(self) -> Observation:
        if self._client.failure is not None:
            raise self._client.failure
        output = self._rollout.result()
        if output.get("error"):
            raise RuntimeError(f"the environment ended with an error: {output['error']['error_chain_repr']}")
        return Observation(done=True, reward=output["reward"], metrics=output["metrics"] or {})


@cache
def _loaded(name: str, args: str) -> Loaded:
    return Loaded(load(name, json.loads(args)), asyncio.new_event_loop())


async def _either(rollout: asyncio.Task[Any], request: Coroutine[Any, Any, Request]) -> Request | None:
    """Wait for a request, or for the end of the rollout that would make it."""
    asked = asyncio.ensure_future(request)
    await asyncio.wait((rollout, asked), return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        return asked.result()
    asked.cancel()
    await asyncio.wait((asked,))
    return None
