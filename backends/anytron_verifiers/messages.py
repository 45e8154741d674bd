"""Messages of verifiers in the form of chat templates, tools of prompts, and tool calls in a model's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from anytron.base.functions import Called, Kind
from anytron.serving.conversation import tool_calls_in

ToolCallFormat = Callable[[str], tuple[str, Sequence[tuple[str, str]]]]
"""Takes a turn's text; returns the text without its tool calls, and (tool's name, arguments as JSON) for each call."""


def plain(message: Any) -> dict[str, Any]:
    """Return a message (an object of verifiers, or a mapping in a row) in the form that chat templates read.

    Raises:
        ValueError: The message has content other than text.
    """
    found = dict(message) if isinstance(message, Mapping) else message.model_dump(mode="json")
    return {name: value for name, value in found.items() if value is not None} | {
        "content": _text(found.get("content"))
    }


def said(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Return role and content of each message of a conversation, for comparison."""
    return [(one["role"], one["content"]) for one in map(plain, messages)]


def tools_of(environment: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools that the model may call in the rollout of a row of the dataset, as chat templates read them."""
    own = (row.get("info") or {}).get("tool_defs")
    return [as_function(tool) for tool in (environment.tool_defs if own is None else own) or ()]


def as_function(tool: Any) -> dict[str, Any]:
    """Describe a tool (an object of verifiers, or a mapping in a row) in the form that chat templates read."""
    return {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if others := sorted({str(part.get("type")) for part in parts} - {"text"}):
        raise ValueError(f"a message has {', '.join(others)}; only text is supported")
    return "".join(part["text"] for part in parts)


TOOL_CALLS = Kind(
    "environment.options.tool_calls",
    Called(
        "A format of tool calls",
        ("text",),
        "text is what the model wrote in a turn",
        "a tuple: the text without its tool calls, and a list with (the tool's name, its arguments as JSON) for each "
        "call",
    ),
)

FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType({"hermes": tool_calls_in})
"""Formats of tool calls, by their name in the option ``tool_calls``."""


def found_in(text: str, tool_calls: ToolCallFormat) -> tuple[str, Sequence[tuple[str, str]]]:
    """Find the tool calls in a text of the model, with a function that may be the user's.

    Raises:
        DataError: The function raises, or returns an invalid value.
    """
    if tool_calls in FORMATS.values():  # a bug of a registered one is ours
        return tool_calls(text)
    found = TOOL_CALLS.call.call(tool_calls, TOOL_CALLS.key, text)
    match found:
        case (str(), [*calls]) if all(_is_call(one) for one in calls):
            return found[0], calls
    raise TOOL_CALLS.call.unusable(tool_calls, repr(found)[:200]).error(TOOL_CALLS.key)


def _is_call(found: object) -> bool:
    match found:
        case (str(), str()):
            return True
    return False
