"""The processes of a run's environments.

A process holds the environments of several conversations. The calls that wait for a process are sent in one message;
the process makes one call after another, and sends each answer as soon as it has it. So the pool knows the current
call, and the time-out applies to this call alone: it counts from the answer to the previous call.

If a process ends or hangs, only the conversation of the current call fails. The environments of its other conversations
are made again in a new process by repeating their earlier calls, which must give the same answers again.
"""

from __future__ import annotations

import shutil
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from anytron.base.errors import ConfigError
from anytron.config.imports import resolve
from anytron.task.environments.protocol import AGENT_FUNCTION, ENVIRONMENT_PATH, Observation
from anytron.task.environments.worker import Call, Reply
from anytron.task.isolation.failure import Failure
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from anytron.config.generation import EnvironmentSection
    from anytron.config.schema import RunConfig
    from anytron.task.environments.protocol import AgentResult, AgentTask, Task, Turn


MOST_CALLS = 64
"""Most calls in one message: the process holds the arguments of all these calls, which contain the prompts' data."""

Answer = tuple[int, "Observation | AgentResult | Failure"]
"""Number of a conversation, and the observation of its environment, the result of its agent, or the failure that ends
the conversation."""


def check_environment(section: EnvironmentSection) -> None:
    """Check that an environment's class or an agent's function exists and accepts its options.

    Raises:
        ConfigError: The class, the function or the program does not exist; the class lacks a method; or the options
            are not accepted.
    """
    resolve(section.called[1], AGENT_FUNCTION if section.is_agent else ENVIRONMENT_PATH, options=section.arguments)
    if section.command and shutil.which(section.command[0]) is None:
        raise ConfigError(
            "The program of the agent does not exist.",
            where=f"environment.command ({section.command[0]})",
            why="it is not a file that can be executed, and no directory of PATH has such a file",
            fix="name the program with its path, relative to the YAML file; chmod +x makes a file executable",
        )


def start_environments(config: RunConfig, logs: Path) -> AbstractContextManager[EnvironmentPool | None]:
    """Start the processes of a run's environments, without waiting for them; None for a run without environments."""
    if config.environment is None:
        return nullcontext()
    return EnvironmentPool(config.environment, logs, config.executor.start_timeout_s)


@dataclass
class Host:
    """A process and the conversations whose environments live in it.

    Attributes:
        process: The process.
        log: Log file of the process.
        past: For each conversation, the answered calls with their answers.
        queue: Calls that wait to be sent, each with its expected answer: the earlier answer if the call is repeated in
            a new process, None if the call is new.
        calls: Calls, as in ``queue``, that were sent and not yet answered; the process is working on the first one.
    """

    process: IsolatedProcess
    log: Path
    past: dict[int, list[tuple[Call, Reply]]] = field(default_factory=dict)
    queue: deque[tuple[Call, Reply | None]] = field(default_factory=deque)
    calls: deque[tuple[Call, Reply | None]] = field(default_factory=deque)


class EnvironmentPool:
    """Environments in separate processes. A context manager: leaving ends the processes.

    Args:
        section: Section ``environment`` of the configuration.
        logs: Directory in which each process writes ``environment-N.log``; created if missing.
        start_timeout_s: Seconds that a process may take to start and find the class. The constructor does not wait.
    """

    def __init__(self, section: EnvironmentSection, logs: Path, start_timeout_s: float) -> None:
        key, path = section.called
        options = section.model_copy(update={"options": section.arguments}).model_dump(mode="json")["options"]
        self._settings = ProcessSettings(
            title="An environment process",
            where=f"{key} ({path})",
            worker="anytron.task.environments.worker",
            start={"path": path, "options": options, "is_agent": section.is_agent},
            timeout_s=section.timeout_s,
            memory_gib=section.memory_gib,
            start_timeout_s=start_timeout_s,
        )
        self._numbers = 0
        self._hosts: list[Host] = []
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(section.processes):
                log = logs / f"environment-{number}.log"
                self._hosts.append(Host(IsolatedProcess(self._settings, log), log))
        except BaseException:
            self.close()
            raise

    @property
    def busy(self) -> bool:
        """Whether any call is unanswered."""
        return any(host.calls or host.queue for host in self._hosts)

    def knows(self, number: int) -> bool:
        """Whether a conversation still has an environment: it has not failed, and :meth:`end` has not closed it."""
        return any(number in host.past for host in self._hosts)

    def begin(self, task: Task) -> int:
        """Request an environment for a new conversation, without waiting; return the conversation's number."""
        return self._begin("reset", task)

    def run(self, task: AgentTask) -> int:
        """Run an agent, without waiting; return its number. :meth:`poll` returns its result, and forgets it."""
        return self._begin("run", task)

    def step(self, number: int, turn: Turn) -> None:
        """Send a turn of the model to a conversation's environment; :meth:`poll` returns the answer."""
        self._host_of(number).queue.append((Call(number, "step", turn), None))

    def end(self, number: int) -> None:
        """Request that a conversation's environment is closed, if the conversation still has one."""
        for host in self._hosts:
            if number in host.past:
                host.queue.append((Call(number, "close"), None))

    def poll(self, seconds: float) -> list[Answer]:
        """Send calls and wait until some are answered, or until this many seconds have passed.

        Returns:
            For each answer the number of its conversation, and the observation or the failure. The pool has forgotten
            a conversation that failed.

        Raises:
            DataError: A process could not start, or cannot read a task.
        """
        deadline = monotonic() + seconds
        found: list[Answer] = []
        while self.busy and not found:
            for host in self._hosts:
                if host.queue and not host.calls:
                    self._call(host)
            at_work = [host for host in self._hosts if host.calls]
            until = min([deadline, *(host.process.deadline for host in at_work)])
            wait([host.process.connection for host in at_work], max(0.0, until - monotonic()))
            for host in at_work:
                while host.calls and (message := host.process.receive()) is not None:
                    found += self._taken(host, message)
            if monotonic() >= deadline:
                break
        return found

    def postpone(self, seconds: float) -> None:
        """Give the current call of each process this many more seconds."""
        for host in self._hosts:
            host.process.postpone(seconds)

    def close(self) -> None:
        """End the processes."""
        for host in self._hosts:
            host.process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self, method: Literal["reset", "run"], task: Task) -> int:
        number, self._numbers = self._numbers, self._numbers + 1
        host = min(self._hosts, key=lambda host: len(host.past))
        host.past[number] = []
        host.queue.append((Call(number, method, task), None))
        return number

    def _host_of(self, number: int) -> Host:
        return next(host for host in self._hosts if number in host.past)

    def _call(self, host: Host) -> None:
        """Send a process its waiting calls."""
        if host.process.ended:
            self._replace(host)
        while host.queue and len(host.calls) < MOST_CALLS:
            host.calls.append(host.queue.popleft())
        host.process.send([call for call, _ in host.calls])

    def _taken(self, host: Host, message: Mapping[str, Any] | Gone) -> list[Answer]:
        """Handle the answer of a process to its current call."""
        call, expected = host.calls.popleft()
        known = call.number in host.past  # not if another of the same message's calls has failed it
        reply = self._reply(host, message, call)
        failure = self._failure(reply, call, expected)
        if failure is not None or call.method == "close":
            self._forget(host, call.number)
            if failure is not None and failure.ends:
                self._replace(host)
            return [(call.number, failure)] if failure is not None and known and call.method != "close" else []
        assert not isinstance(reply, Gone), "that is a failure"
        if call.method == "run":
            self._forget(host, call.number)
            return [] if reply.observation is None else [(call.number, reply.observation)]
        if expected is None and known:
            host.past[call.number].append((call, reply))
        if expected is not None or not known or reply.observation is None:
            return []
        return [(call.number, reply.observation)]

    @staticmethod
    def _reply(host: Host, message: Mapping[str, Any] | Gone, call: Call) -> Reply | Gone:
        if isinstance(message, Gone):
            return message
        try:
            return Reply.from_json(message, call)
        except ValueError as error:
            return host.process.reject(f"an invalid answer to {call.method}(): {error}")

    def _failure(self, reply: Reply | Gone, call: Call, expected: Reply | None) -> Failure | None:
        """Return why a conversation cannot go on; None if it can."""
        if isinstance(reply, Gone):
            name = "An agent" if call.method == "run" else "An environment"
            if reply.late:
                what, fix = f"{name} took too long.", "if it is only slow, raise environment.timeout_s"
                why = f"more than {self._settings.timeout_s:g} s for {call.method}(); {reply.why}"
                return Failure(what, why, fix, ends=True)
            if reply.nonsense:
                fix = "let its code write only to files and sockets that it has opened"
                return Failure(f"{name} process sent an invalid answer.", reply.why, fix, ends=True)
            fix = "the kernel usually sends SIGKILL when memory runs out: set environment.memory_gib"
            other = "run programs in a separate process, so that they cannot end this one"
            return Failure(f"{name} process died.", reply.why, fix if reply.killed else other, ends=True)
        if reply.failure is not None:
            return reply.failure
        if expected is not None and (now := _said(reply)) != (before := _said(expected)):
            return Failure(
                "An environment answered differently when its calls were repeated.",
                (
                    f"another conversation ended the process that they shared; when repeated, {call.method}() returned "
                    f"{now}, and before {before}"
                ),
                "derive all randomness from Task.seed, or raise environment.processes",
            )
        return None

    @staticmethod
    def _forget(host: Host, number: int) -> None:
        host.past.pop(number, None)
        host.queue = deque(entry for entry in host.queue if entry[0].number != number)

    def _replace(self, host: Host) -> None:
        """Start another process, and queue the calls that make the remaining environments again."""
        host.process.end()
        host.process = IsolatedProcess(self._settings, host.log)
        again: list[tuple[Call, Reply | None]] = [entry for past in host.past.values() for entry in past]
        waiting = (entry for entry in [*host.calls, *host.queue] if entry[1] is None and entry[0].number in host.past)
        host.queue, host.calls = deque([*again, *waiting]), deque()


def _said(reply: Reply) -> tuple[object, ...] | None:
    """Return the parts of a reply that must be equal when its call is repeated; None without an observation."""
    found = reply.observation
    return None if not isinstance(found, Observation) else (found.text, found.messages, found.tokens, found.done)
