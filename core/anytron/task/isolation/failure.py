"""Why a user's code gave no usable answer, and answers of processes that run such code."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from anytron.base.functions import Called

Read = TypeVar("Read")


def ending(status: int) -> str:
    """Return how a process ended.

    Args:
        status: Its exit status; minus the number of the signal that ended it.
    """
    if status >= 0:
        return f"exited with status {status}"
    names = {one.value: one.name for one in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"


@dataclass(frozen=True)
class Failure:
    """Why there is no usable answer.

    Attributes:
        what: As a sentence.
        why: The cause: a traceback, what was returned, how a process ended.
        fix: What would help.
        ends: The process had better be replaced: its memory is full, or the code wanted to end it.
    """

    what: str
    why: str
    fix: str = ""
    ends: bool = False

    @classmethod
    def raised(cls, error: BaseException, called: Called, function: object, section: str) -> Failure:
        """Return what a function has raised.

        Args:
            error: What it raised.
            called: How it was called.
            function: The user's function.
            section: Of the configuration, which has ``memory_gib``.
        """
        what, why, fix = called.raised(error, function)
        if isinstance(error, MemoryError):
            what, fix = f"{called.name} ran out of memory.", f"raise {section}.memory_gib, or let it use less memory"
            return Failure(what, why, fix, ends=True)
        return Failure(what, why, fix, ends=not isinstance(error, Exception))


def read(kind: type[Read], record: object) -> Read:
    """Make a dataclass of plain values that come from a process which runs a user's code, and may be anything.

    Raises:
        ValueError: They are not those of the dataclass.
    """
    from pydantic import ValidationError

    try:
        hashable: Any = kind  # mypy takes the __hash__ of its instances
        answer: Read = _reader(hashable).validate_python(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return answer


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
