"""The processes of a run's environments.

A process holds the environments of several conversations. All calls that wait for a process are sent in one message;
the process makes them one after another, and answers each at once. So the current call is known, and the time-out
applies to it alone: it counts from the answer to the previous call.

If the process is lost, only the conversation of the current call fails. The environments of the other conversations are
made again in another process, by repeating their earlier calls, and must give the same answers again.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from anytron.config.imports import resolve
from anytron.task.environments.protocol import ENVIRONMENT_PATH
from anytron.task.environments.worker import Call, Reply
from anytron.task.isolation.failure import Failure
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from anytron.config.generation import EnvironmentSection
    from anytron.config.schema import RunConfig
    from anytron.task.environments.protocol import Observation, Task, Turn


MOST_CALLS = 64
"""In one message: the process holds the arguments of them all, data of prompts among them."""

Answer = tuple[int, "Observation | Failure"]
"""A conversation's number, and what its environment says."""


def check_environment(section: EnvironmentSection) -> None:
    """Check that the class is an environment and accepts its options.

    Raises:
        ConfigError: The class does not exist, lacks a method, or does not accept its options.
    """
    resolve(section.path, ENVIRONMENT_PATH, options=section.options)


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
        queue: Waiting calls. A call that is repeated has the earlier answer, which must be given again; others have
            None.
        calls: Calls in the same form that were sent and not yet answered; the process is working on the first.
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
        start_timeout_s: Seconds until a process must have found the class. The constructor does not wait for it.
    """

    def __init__(self, section: EnvironmentSection, logs: Path, start_timeout_s: float) -> None:
        self._settings = ProcessSettings(
            title="An environment process",
            where=f"environment.path ({section.path})",
            worker="anytron.task.environments.worker",
            start={"path": section.path, "options": section.model_dump(mode="json")["options"]},
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
        """Whether a conversation has an environment; it has none after a failure or after :meth:`end`."""
        return any(number in host.past for host in self._hosts)

    def begin(self, task: Task) -> int:
        """Make an environment for a conversation; return the conversation's number."""
        number, self._numbers = self._numbers, self._numbers + 1
        host = min(self._hosts, key=lambda host: len(host.past))
        host.past[number] = []
        host.queue.append((Call(number, "reset", task), None))
        return number

    def step(self, number: int, turn: Turn) -> None:
        """Send a turn of the model to a conversation's environment; :meth:`poll` returns the answer."""
        self._host_of(number).queue.append((Call(number, "step", turn), None))

    def end(self, number: int) -> None:
        """Close a conversation's environment, if it still has one."""
        for host in self._hosts:
            if number in host.past:
                host.queue.append((Call(number, "close"), None))

    def poll(self, seconds: float) -> list[Answer]:
        """Process calls until some are answered or the time is over.

        Returns:
            The observations, and the numbers of the conversations that cannot go on, which the pool
            has forgotten.

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

    def close(self) -> None:
        """End the processes."""
        for host in self._hosts:
            host.process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        """Take what a process answers to the call that it was in."""
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
            if reply.late:
                what, fix = "An environment took too long.", "if it is only slow, raise environment.timeout_s"
                why = f"more than {self._settings.timeout_s:g} s for {call.method}(); {reply.why}"
                return Failure(what, why, fix, ends=True)
            if reply.nonsense:
                fix = "do not write into the channel that Anytron opens in this process"
                return Failure("An environment process sent an invalid answer.", reply.why, fix, ends=True)
            fix = "the kernel usually sends SIGKILL when memory runs out: set environment.memory_gib"
            other = "run programs in a separate process, so that they cannot end this one"
            return Failure("An environment process died.", reply.why, fix if reply.killed else other, ends=True)
        if reply.failure is not None:
            return reply.failure
        if expected is not None and (now := _said(reply)) != (before := _said(expected)):
            return Failure(
                "An environment did not repeat itself.",
                (
                    f"another conversation ended its process; when repeated, {call.method}() said {now}, and before "
                    f"{before}"
                ),
                "derive all randomness from Task.seed, or raise environment.processes",
            )
        return None

    @staticmethod
    def _forget(host: Host, number: int) -> None:
        host.past.pop(number, None)
        host.queue = deque(entry for entry in host.queue if entry[0].number != number)

    def _replace(self, host: Host) -> None:
        """Start another process, and have the environments that are left made again in it."""
        host.process.end()
        host.process = IsolatedProcess(self._settings, host.log)
        again: list[tuple[Call, Reply | None]] = [entry for past in host.past.values() for entry in past]
        waiting = (entry for entry in [*host.calls, *host.queue] if entry[1] is None and entry[0].number in host.past)
        host.queue, host.calls = deque([*again, *waiting]), deque()


def _said(reply: Reply) -> tuple[object, ...] | None:
    """What the model has read of an answer, or would have."""
    found = reply.observation
    return None if found is None else (found.text, found.messages, found.tokens, found.done)
