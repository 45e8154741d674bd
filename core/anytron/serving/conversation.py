"""The messages of a chat request: checked, in the form that chat templates read, and as keys for a comparison."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anytron.config.json_files import is_writable, parse_json, parse_object, strings
from anytron.serving.pictures import check_image, digests_of, is_image
from anytron.serving.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
"""Fields of a message that a template may read; other fields must be null."""
SHOWN = 100
"""Most letters of a client's names that an error shows."""
DEEPEST = 16
"""Most levels of nesting in the arguments of a tool call."""


@dataclass(frozen=True)
class Conversation:
    """The messages and tools of a chat request.

    Attributes:
        messages: Messages as clients sent them, checked; at least one, and the last is not the assistant's.
        tools: Descriptions of the tools, as OpenAI's API has them.
        template: Further arguments of the chat template.
        keys: ``keys[i]`` stands for tools, template arguments and the first i messages.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        keys = [_digest(b"", {"tools": list(self.tools), "template": dict(self.template)})]
        for message in self.messages:
            keys.append(extended(keys[-1], message))
        object.__setattr__(self, "keys", tuple(keys))

    def assistants(self, begin: int = 0) -> list[int]:
        """Return the places of the assistant's messages, from a place on."""
        return [place for place in range(begin, len(self.messages)) if self.messages[place]["role"] == "assistant"]


def extended(key: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the key of a conversation with one more message."""
    return _digest(key, {**rendered(message), "images": digests_of(message)})


def rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates read it: content is text, arguments of a tool call are a mapping.

    Content with an image is a list of parts.

    Messages are compared in this form, so that spaces and the order of keys in arguments do not count.
    """
    found = {name: message[name] for name in sorted(FIELDS & message.keys()) if message[name]}
    found["content"] = _content(message.get("content"))
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def check_messages(messages: Sequence[Any], *, images: bool = False) -> None:
    """Check the messages of a request.

    Args:
        messages: The messages.
        images: Whether the model takes images.

    Raises:
        Refusal: A message has no known role, content other than text and images, an image that cannot be used, or a
            field that would be ignored.
    """
    for place, message in enumerate(messages):
        if all(is_writable(text) for _, text in strings(message)):
            why = _mistake(message)
        else:
            why = "it has half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        if why is not None:
            raise Refusal(400, "invalid_message", f"messages[{place}] cannot be used: {why}.", f"messages[{place}]")
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            where = f"messages[{place}].content[{number}]"
            if is_image(part) and not images:
                raise Refusal(400, "no_images", f"{where} is an image, and this model takes text only.", where)
            if is_image(part):
                check_image(part, message["role"], where)
    if not messages or messages[-1]["role"] == "assistant":
        why = "the last message must not be the assistant's: the server writes the assistant's next message"
        raise Refusal(400, "invalid_message", f"There is nothing to answer: {why}.", "messages")


def _mistake(message: Any) -> str | None:
    """Return what is wrong with a message; None if nothing is."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return f"it must be an object whose role is one of {', '.join(ROLES)}"
    if other := sorted(name for name, value in message.items() if name not in FIELDS and value not in (None, [], {})):
        return f"the server does not read {', '.join(other)[:SHOWN]}; remove it"
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(message.get(name, ""), (str, type(None))):
            return f"{name} must be text"
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not is_image(part) and not _is_text(part):
                return "its content must be text, or a list of parts of the types text and image_url"
    elif not isinstance(content, (str, type(None))):
        return "its content must be text, or a list of parts of the types text and image_url"
    calls = message.get("tool_calls")
    if calls is not None and (message["role"] != "assistant" or not isinstance(calls, list)):
        return "only the assistant's messages have tool_calls, a list"
    return (
        None if all(_is_call(call) for call in calls or ()) else "a tool call needs a function with name and arguments"
    )


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: object) -> bool:
    match call:
        case {"function": {"name": str(), "arguments": str()}}:
            return True
    return False


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    named = {"name": function["name"], "arguments": _arguments(function["arguments"])}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content or ""
    if any(map(is_image, content)):
        return [{"type": "image"} if is_image(part) else {"type": "text", "text": part["text"]} for part in content]
    return "".join(part["text"] for part in content)


def _arguments(text: str) -> Any:
    """Return the mapping that the text stands for; the text if it stands for no mapping."""
    try:
        return parse_object(text, DEEPEST)
    except ValueError:
        return text


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(before + text.encode()).digest()


def tool_calls_in(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen2.5 and Qwen3 write it.

    As in other inference servers, a text with one malformed call counts as one without calls. A call with a number that
    is not finite or with half of a surrogate pair is malformed: no client could read it.

    Returns:
        The text before the first call, and for each call the tool's name and its arguments as JSON.
    """
    before, mark, rest = text.partition("<tool_call>")
    if not mark:
        return text, []
    found = []
    for part in rest.split("<tool_call>"):
        try:
            name, arguments = _written_call(parse_json(part.partition("</tool_call>")[0], DEEPEST + 2))
        except ValueError:
            return text, []
        found.append((name, arguments))
    return before, found


def _written_call(call: object) -> tuple[str, str]:
    """Return name and arguments of a call that the model wrote; ValueError if it is malformed."""
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            if is_writable(name) and is_writable(text):
                return name, text
    raise ValueError("a tool call must have a name (text) and arguments (an object), and nothing else")
