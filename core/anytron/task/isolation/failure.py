"""The reason why a user's code gave no usable answer, and reading answers of processes that run such code."""

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
    """Describe how a process ended.

    Args:
        status: Exit status of the process; negative = minus the number of the signal that ended it.
    """
    if status >= 0:
        return f"exited with status {status}"
    names = {one.value: one.name for one in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"


@dataclass(frozen=True)
class Failure:
    """Why a call has no usable answer.

    Attributes:
        what: What failed, as a sentence.
        why: The cause: a traceback, the returned value, or how a process ended.
        fix: How to solve the problem.
        ends: Whether to replace the process: its memory is full, or the code tried to end it.
    """

    what: str
    why: str
    fix: str = ""
    ends: bool = False

    @classmethod
    def raised(cls, error: BaseException, called: Called, function: object, section: str) -> Failure:
        """Make the failure of a function that raised an exception.

        Args:
            error: The exception.
            called: How the function is called.
            function: The user's function.
            section: Section of the configuration with ``memory_gib``.
        """
        what, why, fix = called.raised(error, function)
        if isinstance(error, MemoryError):
            what, fix = (
                f"{called.name} ran out of memory.",
                f"raise {section}.memory_gib, or let the code use less memory",
            )
            return Failure(what, why, fix, ends=True)
        return Failure(what, why, fix, ends=not isinstance(error, Exception))


def read(kind: type[Read], record: object) -> Read:
    """Make a dataclass from plain values, which may be anything: they come from a process that runs a user's code.

    Raises:
        ValueError: The values do not match the dataclass.
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
