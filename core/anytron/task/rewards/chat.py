"""Ask a server with OpenAI's interface of chat completions, again if need be."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.request
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError, URLError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from email.message import Message

LARGEST = 8 << 20
"""Bytes of an answer."""
LONGEST_WAIT_S = 60.0
AGAIN = frozenset({408, 409, 425, 429})
"""Beside 5xx, the statuses after which the same question can get an answer."""
_UNUSABLE = (URLError, OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError)
"""Raised where a server does not answer, or answers with something else; also by JSON that is nested without end."""
_T = TypeVar("_T")


class NoAnswer(Exception):  # noqa: N818 - it is what a reward has in place of a number
    """There is no usable answer; the text says what came instead."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow nobody elsewhere: the key would go along."""

    def redirect_request(self, *_: object) -> None:
        """Refuse."""


class Chat:
    """A server's chat completions. Threads may share it.

    Args:
        url: Without ``/chat/completions``.
        secret: The key; empty = none. It is sent to this server and told to nobody else.
        timeout_s: Seconds for one answer.
        attempts: How often to ask.
        backoff_s: Seconds to wait before asking for the second time.
    """

    def __init__(self, url: str, secret: str, timeout_s: float, attempts: int, backoff_s: float) -> None:
        self._address = f"{url}/chat/completions"
        self._secret, self._timeout_s, self._attempts, self._backoff_s = secret, timeout_s, attempts, backoff_s
        self._opener = urllib.request.build_opener(_NoRedirect)

    def ask(self, body: Mapping[str, Any], read: Callable[[str], _T]) -> _T:
        """Ask until there is an answer that can be read.

        Args:
            body: The request.
            read: Reads the text of the answer; raises ValueError if it is of no use.

        Raises:
            NoAnswer: There is none after all attempts, or there would be none after any number of them.
        """
        data = json.dumps(body).encode()
        for attempt in range(1, self._attempts + 1):
            wait = min(LONGEST_WAIT_S, self._backoff_s * 2 ** (attempt - 1)) * random.uniform(0.75, 1.25)
            try:
                return read(self._text(data))
            except HTTPError as error:
                with error:
                    why = f"status {error.code}: {self._quoted(error)}"
                if error.code not in AGAIN and error.code < 500:
                    raise self._no_answer(why, attempt) from None
                wait = max(wait, _asked_to_wait(error.headers))
            except _UNUSABLE as error:
                why = f"{type(error).__name__}: {error}"
            if attempt < self._attempts:
                time.sleep(wait)
        raise self._no_answer(why, self._attempts)

    def _text(self, data: bytes) -> str:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        request = urllib.request.Request(self._address, data, headers, method="POST")  # noqa: S310 - http or https
        end = time.monotonic() + self._timeout_s
        with self._opener.open(request, timeout=self._timeout_s) as response:
            parts, size = [], 0
            while part := response.read1(1 << 16):  # whatever is there: a server can send a byte a minute
                parts.append(part)
                size += len(part)
                if size > LARGEST:
                    raise ValueError(f"its answer is longer than {LARGEST} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"its answer took more than {self._timeout_s:g} s")
        text: object = json.loads(b"".join(parts))["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"its answer has {type(text).__name__} where text should be")
        return text

    def _quoted(self, error: HTTPError) -> str:
        try:
            return str(error.read1(1000), errors="replace")[:300]
        except (OSError, http.client.HTTPException):
            return ""

    def _no_answer(self, why: str, attempts: int) -> NoAnswer:
        if self._secret:
            why = why.replace(self._secret, "[the key]")  # servers repeat a key that they refuse
        times = "once" if attempts == 1 else f"{attempts} times"
        return NoAnswer(f"{self._address} was asked {times}; the last time: {why}")


def _asked_to_wait(headers: Message) -> float:
    """Seconds of ``Retry-After``; 0 if there is none, or a date."""
    asked = headers.get("Retry-After", "")
    return min(LONGEST_WAIT_S, float(asked)) if asked.isascii() and asked.isdigit() else 0.0
