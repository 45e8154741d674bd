"""Turn torch.compile off: functions run as they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def leave_uncompiled(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``torch.compile``: return the function itself or, without one, a decorator that does so."""

    def compile(model: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:  # noqa: A001
        return (lambda function: function) if model is None else model

    return compile
