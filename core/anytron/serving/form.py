"""The answers to chat completions and completions: whole, or as the events of a stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anytron.serving import answers
from anytron.serving.requests import ChatBody, CompletionBody

if TYPE_CHECKING:
    from anytron.serving.answers import Written
    from anytron.serving.requests import Common
    from anytron.serving.service import Asked, Service
    from anytron.workers.engines.rollout_engine import Response as Sampled


class Form:
    """The form of the answer to a chat completion or a completion.

    Args:
        service: The service that answers.
        body: Body of the request.
    """

    def __init__(self, service: Service, body: Common) -> None:
        self._service, self.body = service, body
        self._chat = isinstance(body, ChatBody)
        self._name = answers.new_id("chatcmpl" if self._chat else "cmpl")
        self._begun = False

    def whole(self, asked: Asked, found: list[Written]) -> dict[str, Any]:
        """Return the answer."""
        choices = []
        for place, one in enumerate(found):
            said = {"message": one.message} if self._chat else {"text": one.text}
            choices.append(self._choice(place, said, one.response, one))
        prompt = {"prompt_token_ids": list(asked.tokens)} if self.body.return_token_ids else {}
        kind = "chat.completion" if self._chat else "text_completion"
        used = answers.usage(len(asked.tokens), found)
        return {**self._head(kind), "choices": choices, "usage": used, **prompt, **self._session(asked)}

    def chunk(self, asked: Asked, text: str, part: Sampled, last: Written | None) -> str:
        """Return the event of a part of the answer; ``last`` is the whole answer, with its last part."""
        if self._chat:
            delta: dict[str, Any] = {} if self._begun else {"role": "assistant"}
            calls = () if last is None else last.message.get("tool_calls", ())
            delta["content"] = last.message["content"] if last is not None and calls else text
            if calls:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
            said = {"delta": delta}
        else:
            said = {"text": text}  # type: ignore[dict-item]
        self._begun = True
        choice = self._choice(0, said, part, last)
        extension = {} if last is None else self._session(asked)
        return event_of({**self._head(self._kind), "choices": [choice], **extension})

    def usage_chunk(self, asked: Asked, whole: Written) -> str:
        """Return the event that counts the tokens."""
        return event_of({**self._head(self._kind), "choices": [], "usage": answers.usage(len(asked.tokens), [whole])})

    def _session(self, asked: Asked) -> dict[str, Any]:
        """Return the field that says what records the answer, and how much of the history no engine wrote for it."""
        if not self._chat or asked.session is None:
            return {}
        return {"session": {"id": asked.session.id, "examples": asked.examples}}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return answers.head(kind, self._name, self._service.model.name)

    def _choice(self, place: int, said: dict[str, Any], response: Sampled, whole: Written | None) -> dict[str, Any]:
        log_probs = None
        decode = self._service.model.decode
        if isinstance(self.body, ChatBody) and self.body.logprobs:
            log_probs = answers.chat_log_probs(response, decode)
        elif isinstance(self.body, CompletionBody) and self.body.logprobs is not None:
            log_probs = answers.completion_log_probs(response, decode)
        tokens = answers.token_fields(response) if self.body.return_token_ids else {}
        reason, stop = (None, None) if whole is None else (whole.finish_reason, whole.stop)
        end = {"finish_reason": reason, "stop_reason": stop}
        return {"index": place, **said, "logprobs": log_probs, **end, **tokens}


def event_of(value: dict[str, Any]) -> str:
    """Return an event of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
