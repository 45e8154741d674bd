"""The calls that environments answer in their process, and the answers as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from anytron.environments.protocol import Observation, Task, Turn
from anytron.isolation.failure import Failure, read, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.environments.protocol import Environment


@dataclass(frozen=True)
class Call:
    """A call of an environment's method.

    Attributes:
        number: Of the conversation.
        method: Which; ``reset`` makes the environment, ``close`` forgets it.
        argument: A :class:`Task` for ``reset``, a :class:`Turn` for ``step``.
    """

    number: int
    method: Literal["reset", "step", "close"]
    argument: Task | Turn | None = None


@dataclass(frozen=True)
class Reply:
    """What a call came to.

    Attributes:
        observation: What the environment says; None except from ``step``.
        failure: Why the conversation is over; None if it is not.
    """

    observation: Observation | None = None
    failure: Failure | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any], call: Call) -> Reply:
        """Read what :func:`answer` gave, in a process that runs a user's code: it may be anything.

        Raises:
            ValueError: It is no answer to this call.
        """
        if "failure" in record:
            return cls(failure=read(Failure, record["failure"]))
        if call.method != "step":
            return cls()
        try:
            return cls(Observation.from_json(record["observation"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def answer(call: Call, environments: dict[int, Environment], make: Callable[[], Environment]) -> dict[str, Any]:
    """Make a call. Whatever the environment does is an answer, ``exit()`` too.

    Args:
        call: It.
        environments: Those of this process by their conversations' numbers; changed.
        make: Makes another one.

    Returns:
        ``observation`` (None except from ``step``), or the ``failure`` that ends the conversation.
    """
    observation = None
    try:
        if call.method == "reset":
            environments[call.number] = make()
            environments[call.number].reset(call.argument)  # type: ignore[arg-type]
        elif call.method == "step":
            observation = _checked(environments[call.number].step(call.argument))  # type: ignore[arg-type]
        else:
            getattr(environments.pop(call.number, None), "close", _nothing)()
    except BaseException as error:  # noqa: BLE001 - the environment is the user's
        environments.pop(call.number, None)
        if call.method == "close":
            print(traced(error), flush=True)  # in this process's log: it costs nothing, and nobody else hears of it
        return {"failure": asdict(_failure(error))}
    return {"observation": observation}


def _checked(found: object) -> dict[str, Any]:
    if not isinstance(found, Observation):
        raise TypeError(f"step() returned {type(found).__name__}, not an Observation")
    return found.as_json()


def _nothing() -> None:
    """Stand for the method ``close`` that an environment does not have."""


def _failure(error: BaseException) -> Failure:
    if isinstance(error, MemoryError):
        fix = "raise environment.memory_gib, or let the environment keep less"
        return Failure("An environment ran out of memory.", traced(error), fix, ends=True)
    if isinstance(error, Exception):
        fix = "let the environment answer what the model may write with an observation"
        return Failure("An environment raised.", traced(error), fix)
    fix = "return an Observation; a program that the environment runs belongs into a process of its own"
    return Failure("An environment wanted to end its process.", traced(error), fix, ends=True)
