"""The bodies of answers, in the forms of OpenAI's API and of vLLM's route of token ids."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.serving.conversation import tool_calls_in
from anytron.serving.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.serving.sessions import Reward, Turn
    from anytron.workers.engines.rollout_engine import Response


@dataclass(frozen=True)
class Written:
    """What the model has written: a response, and the text that clients see.

    Attributes:
        response: The response, as the engine returned it.
        text: Its text, without special tokens, up to a stop string.
        message: The assistant's message: the text, and the tool calls in it.
        stop: The stop string before which the text ends; None = it ends where the response does.
    """

    response: Response
    text: str
    message: Mapping[str, Any]
    stop: str | None = None

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, in the words of OpenAI's API."""
        if self.message.get("tool_calls"):
            return "tool_calls"
        return "stop" if self.response.finished else "length"


def written(response: Response, text: str, stops: Sequence[str], *, tools: bool) -> Written:
    """Make the text and the message of a response.

    Args:
        response: The response.
        text: Its decoded text.
        stops: Stop strings: the text ends before the first of them.
        tools: Whether tool calls are looked for.
    """
    place, stop = min(((place, stop) for stop in stops if (place := text.find(stop)) >= 0), default=(len(text), None))
    cut = text[:place]
    content, calls = tool_calls_in(cut) if tools else (cut, [])
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": new_id("call"), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return Written(response, cut, message, stop)


def new_id(kind: str) -> str:
    """Return a new name of an object: its kind and 24 random hexadecimal digits."""
    return f"{kind}-{secrets.token_hex(12)}"


def check_finite(response: Response) -> None:
    """Refuse a response with a log-prob that is not finite: engines choose some token even if all log-probs are NaN.

    Raises:
        Refusal: The model's outputs are not finite.
    """
    if wrong := next((one for one in response.log_probs if not math.isfinite(one)), None):
        why = f"the log-prob of a token is {wrong}: weights are probably NaN or infinite"
        raise Refusal(500, "not_finite", f"The model's outputs are not finite: {why}; serve another checkpoint.")


def usage(prompt: int, answers: Sequence[Written]) -> dict[str, int]:
    """Count the tokens of a prompt and of its answers."""
    completion = sum(len(one.response.tokens) for one in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def head(kind: str, name: str, model: str) -> dict[str, Any]:
    """Return the fields with which each answer and each chunk begins.

    Args:
        kind: Kind of the object, for example ``chat.completion``.
        name: Name of the answer.
        model: Name of the model.
    """
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def token_fields(response: Response) -> dict[str, Any]:
    """Return the fields that ``return_token_ids`` adds to a choice: token ids, and each token's version of weights."""
    return {"token_ids": list(response.tokens), "weight_versions": list(response.versions)}


def chat_log_probs(response: Response, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return ``logprobs`` of a choice of a chat completion.

    Args:
        response: The response, or a part of it.
        decode: Function that decodes token ids.
    """
    found = []
    for token, log_prob in zip(response.tokens, response.log_probs, strict=True):
        text = decode([token])
        found.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": found, "refusal": None}


def completion_log_probs(response: Response, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return ``logprobs`` of a choice of a completion; arguments as in :func:`chat_log_probs`."""
    texts = [decode([token]) for token in response.tokens]
    offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": list(response.log_probs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def tokens_answer(response: Response) -> dict[str, Any]:
    """Return the answer of the route of token ids, as vLLM gives it, with each token's version of the weights."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(response.tokens, response.log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        **token_fields(response),
        "finish_reason": "stop" if response.finished else "length",
        "logprobs": {"content": content},
    }
    return {"request_id": new_id("generate"), "choices": [choice]}


def session_answer(
    name: str, counts: Mapping[str, int], turns: Sequence[Turn], reward: Reward | None
) -> dict[str, Any]:
    """Return what a session has recorded: each turn has its own tokens only, so that each token is there once.

    Args:
        name: Name of the session.
        counts: Number of requests by outcome (:attr:`Session.counts`).
        turns: The recorded turns; a turn stands after the one that it continues.
        reward: The session's reward; None = none was sent.
    """
    numbers = {id(turn): number for number, turn in enumerate(turns)}
    worth = None if reward is None else {"reward": reward.reward, "metrics": dict(reward.metrics)}
    return {"id": name, "counts": dict(counts), "turns": [_turn(turn, numbers) for turn in turns], "reward": worth}


def _turn(turn: Turn, numbers: Mapping[int, int]) -> dict[str, Any]:
    given, response = len(turn.given), turn.response
    return {
        "parent": None if turn.before is None else numbers[id(turn.before)],
        "token_ids": [*turn.given, *response.tokens],
        "mask": [0] * given + [1] * len(response.tokens),
        "logprobs": [0.0] * given + list(response.log_probs),
        "weight_versions": [*[None] * given, *response.versions],
    }
