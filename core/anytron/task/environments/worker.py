"""An environment process: it makes environments and answers calls with plain values, until the driver is gone.

Importing this module does not import torch; environments may import it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from anytron.task.environments.protocol import (
    AGENT,
    AGENT_FUNCTION,
    CLOSE,
    ENVIRONMENT_PATH,
    MADE,
    RESET,
    STEP,
    AgentResult,
    Observation,
    Task,
    Turn,
)
from anytron.task.isolation.failure import Failure, read
from anytron.task.isolation.worker import calls, enter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.base.functions import Called
    from anytron.task.environments.protocol import AgentTask, Environment


@dataclass(frozen=True)
class Call:
    """A call of an environment's method.

    Attributes:
        number: Number of the conversation.
        method: Name of the method; ``reset`` makes the environment, ``close`` deletes it. ``run`` calls an agent.
        argument: A :class:`Task` for ``reset``, a :class:`Turn` for ``step``, None for ``close``, an
            :class:`AgentTask` for ``run``.
    """

    number: int
    method: Literal["reset", "step", "close", "run"]
    argument: Task | Turn | None = None


@dataclass(frozen=True)
class Reply:
    """The result of a call.

    Attributes:
        observation: The observation of ``step``, or the result of ``run``; None from other methods.
        failure: The failure that ended the conversation; None if the call succeeded.
    """

    observation: Observation | AgentResult | None = None
    failure: Failure | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any], call: Call) -> Reply:
        """Check and read an answer from a process that runs a user's code and may have written anything.

        Raises:
            ValueError: The value is not an answer to this call.
        """
        if "failure" in record:
            return cls(failure=read(Failure, record["failure"]))
        if call.method not in ("step", "run"):
            return cls()
        try:
            kind = Observation if call.method == "step" else AgentResult
            return cls(kind.from_json(record["observation"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def answer(call: Call, environments: dict[int, Environment], make: Callable[[], Environment]) -> dict[str, Any]:
    """Carry out a call. Any failure of the environment, even ``exit()``, results in an answer.

    After a failure of ``reset`` or ``step`` the environment is closed. A failure of ``close`` is written into the log
    of this process: it costs no conversation.

    Args:
        call: The call to answer.
        environments: The environments of this process by conversation number; updated.
        make: Function that makes an environment.

    Returns:
        ``observation`` (None except from ``step``), or the ``failure`` that ends the conversation.
    """
    try:
        if call.method == "reset":
            environments[call.number] = _made(make)
        return {"observation": _called(environments, call)}
    except _Failed as failed:
        failure = asdict(failed.failure)
        if call.method == "close":
            print(failed.failure.why, flush=True)
        else:
            closed = answer(Call(call.number, "close"), environments, make)
            failure["ends"] |= closed.get("failure", {}).get("ends", False)
        return {"failure": failure}


class _Failed(Exception):  # noqa: N818 - it carries what went wrong, and is none itself
    """An environment gave no usable answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def _made(make: Callable[[], Environment]) -> Environment:
    made: Environment = _ran(MADE, make)
    for method in (RESET, STEP):
        if not callable(getattr(made, method.method, None)):
            raise _Failed(Failure(*MADE.unusable(make, f"a {type(made).__name__}, without {method.signature}")))
    return made


def _called(environments: dict[int, Environment], call: Call) -> dict[str, Any] | None:
    made = environments.pop(call.number, None) if call.method == "close" else environments.get(call.number)
    if made is None and call.method == "step":  # its reset, of the same message, has failed
        raise _Failed(Failure("An environment no longer exists.", "an earlier call of the same conversation failed"))
    called = {"reset": RESET, "step": STEP, "close": CLOSE}[call.method]
    method = getattr(made, call.method, None)
    if method is None:  # close, which an environment may lack
        return None
    found = _ran(called, method, *([] if called is CLOSE else [call.argument]))
    if called is STEP:
        return _plain(found, method)
    if called is RESET and found is not None:
        why = f"{type(found).__name__}, but the model reads the prompt first, so reset() must return None"
        raise _Failed(Failure(*RESET.unusable(method, why)))
    return None


def answer_agent(call: Call, agent: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Run an agent. Any failure of it, even ``exit()``, results in an answer.

    Args:
        call: The call to answer.
        agent: The agent's function.
        options: Its keyword arguments.

    Returns:
        As for :func:`answer`, with the agent's result as the observation.
    """
    if call.method == "close":
        return {"observation": None}

    def run(task: AgentTask) -> Any:
        _reach_directly(urlsplit(task.base_url).hostname or "")
        found = agent(task, **options)
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    try:
        found = _ran(AGENT, run, call.argument, named=agent)
        try:
            return {"observation": AgentResult.of(found).as_json()}
        except (TypeError, ValueError) as error:
            raise _Failed(Failure(*AGENT.unusable(agent, f"an invalid result: {error}"))) from error
    except _Failed as failed:
        return {"failure": asdict(failed.failure)}


def _reach_directly(host: str) -> None:
    """Let clients of HTTP reach a host without the proxy that the environment names, if it names one."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [one.strip() for one in given.split(",") if one.strip()]
    if "*" not in hosts and host not in hosts:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join([*hosts, host])  # libraries read one of the two


def _plain(found: object, method: object) -> dict[str, Any]:
    if not isinstance(found, Observation):
        raise _Failed(Failure(*STEP.unusable(method, f"{type(found).__name__}, not an Observation")))
    try:
        record = found.as_json()
        json.dumps(record["messages"])
    except Exception as error:  # what stands in messages is the user's
        why = f"an Observation that cannot be written as JSON: {type(error).__name__}: {error}"
        raise _Failed(Failure(*STEP.unusable(method, why))) from error
    return record


def _ran(called: Called, function: Callable[..., Any], *given: object, named: Callable[..., Any] | None = None) -> Any:
    """Call a function of the user; ``named`` is the function that errors name, if it is another one."""
    try:
        found = function(*given)
    except BaseException as error:  # `exit()` too
        raise _Failed(Failure.raised(error, called, named or function, "environment")) from error
    if fault := called.returned_async(named or function, found):
        raise _Failed(Failure(*fault))
    return found


def main(channel: int, lifeline: int) -> None:
    """Answer the calls that the driver sends.

    Arguments as for :func:`anytron.task.isolation.worker.enter`.
    """
    connection, start = enter(channel, lifeline)

    from anytron.config.imports import resolve

    options, path = start["options"], start["path"]
    if start["is_agent"]:
        agent = resolve(path, AGENT_FUNCTION, options=options)
        answered = partial(answer_agent, agent=agent, options=options)
    else:
        make = partial(resolve(path, ENVIRONMENT_PATH, options=options), **options)
        answered = partial(answer, environments={}, make=make)
    for call, give in calls(connection, start):
        found = answered(call)
        give(found)
        if found.get("failure", {}).get("ends"):
            return
