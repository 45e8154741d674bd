"""What the server answers if it does not do what a client asks."""

from __future__ import annotations

from typing import Any

FINAL = frozenset(
    {
        "history_not_recorded",
        "image_token_written",
        "template_rerenders",
        "too_many_sessions",
        "session_full",
        "not_finite",
        "not_streamed",
    }
)
"""Codes of requests that would fail again, although their HTTP statuses make clients repeat them."""


class Refusal(Exception):  # noqa: N818 - the answer of a server that works
    """A request that is not answered; the client gets it as an error of OpenAI's API.

    Args:
        status: HTTP status.
        code: Short name of the reason, for programs.
        message: What is wrong and how to solve it, for a person; never a key.
        param: Field of the request; None = no single field is at fault.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        message = message.encode("utf-8", "replace").decode()  # it may quote half of a surrogate pair
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param = None if param is None else param.encode("utf-8", "replace").decode()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: ``x-should-retry`` keeps OpenAI's client from repeating what fails again."""
        return {"x-should-retry": "false"} if self.code in FINAL else {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
