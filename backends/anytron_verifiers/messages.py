"""Messages of verifiers as chat templates read them, and the tools of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def plain(message: Any) -> dict[str, Any]:
    """Give a message, an object of verifiers or a row's mapping, as a chat template reads it.

    Raises:
        ValueError: It has something else than text.
    """
    found = dict(message) if isinstance(message, Mapping) else message.model_dump(mode="json")
    return {name: value for name, value in found.items() if value is not None} | {
        "content": _text(found.get("content"))
    }


def said(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Give who has said what in a conversation, to compare it."""
    return [(one["role"], one["content"]) for one in map(plain, messages)]


def tools_of(environment: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Give the tools that the model may call about a row, as chat templates read them."""
    own = (row.get("info") or {}).get("tool_defs")
    return [as_function(tool) for tool in (environment.tool_defs if own is None else own) or ()]


def as_function(tool: Any) -> dict[str, Any]:
    """Describe a tool, an object of verifiers or a row's mapping, as chat templates read it."""
    return {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}}


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if others := sorted({str(part.get("type")) for part in parts} - {"text"}):
        raise ValueError(f"a message has {', '.join(others)}; only text can be read here")
    return "".join(part["text"] for part in parts)
