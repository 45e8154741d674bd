"""Print every hook call to stderr: ``ANYTRON_TRACE_HOOKS=1``.

One line per implementation that was asked::

    anytron hook build_attn_mask <- cpu: (MaskRequest(format='thd', ...)) = None
    anytron hook build_attn_mask <- neutral-default: (MaskRequest(format='thd', ...)) = AttnMask(kind=none, ...)
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

VARIABLE = "ANYTRON_TRACE_HOOKS"
_LONGEST = 160


def tracing() -> bool:
    """Whether the user asked for a trace."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def traced(hook: str, plugin: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an implementation so that it prints its calls."""

    def call_and_print(*arguments: Any) -> Any:
        asked = f"anytron hook {hook} <- {plugin}: ({', '.join(brief(value) for value in arguments)})"
        try:
            result = call(*arguments)
            if isinstance(result, Iterator):  # a hook written with yield
                result = list(result)
        except BaseException as error:
            print(f"{asked} raised {type(error).__name__}: {error}", file=sys.stderr)
            raise
        print(f"{asked} = {brief(result)}", file=sys.stderr)
        return result

    return call_and_print


def brief(value: Any, depth: int = 0) -> str:
    """Short form of an argument or a result, at most 160 characters; tensors by dtype and shape."""
    if isinstance(value, Enum):
        text = str(value.value)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value) if depth == 0 else ()
        inside = ", ".join(f"{field.name}={brief(getattr(value, field.name), depth + 1)}" for field in fields)
        text = f"{type(value).__name__}({inside or '...'})"
    elif isinstance(value, str | int | float | bool | None):
        text = repr(value)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {brief(item, depth + 1)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple | set | frozenset):
        text = "[" + ", ".join(brief(item, depth + 1) for item in value) + "]"
    else:
        text = getattr(value, "__qualname__", None) or f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
