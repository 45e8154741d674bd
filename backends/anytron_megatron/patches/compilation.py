"""Take the place of ``torch.compile`` and compile nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def run_as_written(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Return the function itself; without one, a decorator that does. Options have no effect."""
    del options
    if model is None:
        return lambda function: function
    return model
