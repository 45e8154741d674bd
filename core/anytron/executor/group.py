"""The processes of one engine on this machine: calls to all ranks, and what happens when one fails."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from anytron.errors import WorkerError
from anytron.executor.address import free_port
from anytron.executor.channel import Call, Failure, Rebuild, Stop, decode, encode
from anytron.executor.process import WorkerProcess, end_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from anytron.config.schema import RunConfig
    from anytron.executor.channel import Message

LAST_WORDS_S = 0.5
"""When a rank fails, how long the others are heard: a rank that was killed makes its peers fail in
their collectives, and their complaints may arrive before its end is noticed."""
STACKS_S = 0.5
"""How long a rank that does not answer gets to write its stacks."""
POLL_S = 1.0
"""How often ended processes are looked for whose channel a child of theirs keeps open."""
CLOSE_S = 10.0
"""How long an engine may take to close."""


class LocalWorkerGroup:
    """A :class:`~anytron.executor.protocol.WorkerGroup` of processes on this machine.

    Args:
        engine: Name of the engine, for people.
        processes: One per rank, in rank order, just started.
        start_timeout_s: Seconds from now until every engine must be built.
        call_timeout_s: Seconds that a call may take.
    """

    def __init__(
        self, engine: str, processes: list[WorkerProcess], *, start_timeout_s: float, call_timeout_s: float
    ) -> None:
        self._engine = engine
        self._processes = processes
        self._start_timeout_s = start_timeout_s
        self._start_deadline = time.monotonic() + start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._ready = False
        self._ended = False

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self._processes)

    @property
    def ended(self) -> bool:
        """Whether the processes have ended: a call failed, or the group was closed."""
        return self._ended

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks with the same arguments; see the protocol."""
        return self._exchange(method, [encode(Call(method, args, kwargs))] * self.size)

    def scatter(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method on all ranks, each with its own arguments; see the protocol."""
        if len(per_rank_args) != self.size:
            raise ValueError(f"{method}: {len(per_rank_args)} sets of arguments for {self.size} ranks")
        return self._exchange(method, [encode(Call(method, args, {})) for args in per_rank_args])

    def rebuild(self, config: RunConfig) -> None:
        """Build engines of another configuration in the same processes; see the protocol.

        They meet at a port of their own: the store of the engines before may not have let go of theirs.
        """
        self._exchange("rebuild", [encode(Rebuild(config.model_dump(mode="json"), free_port()))] * self.size)

    def close(self) -> None:
        """Let every engine close, then end the processes.

        Raises:
            WorkerError: An engine failed to close.
        """
        if self._ended:
            return
        try:
            if self._ready:
                self._request("close", [encode(Stop())] * self.size, CLOSE_S, "")
                deadline = time.monotonic() + CLOSE_S
                for process in self._processes:
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self.end()

    def end(self) -> None:
        """End the processes without a word to their engines."""
        if not self._ended:
            self._ended = True
            end_all(self._processes)

    def _exchange(self, method: str, messages: list[Message]) -> list[Any]:
        if self._ended:
            raise WorkerError(
                f"cannot call {method}() of engine {self._engine!r}: its processes have ended",
                where=self._processes[0].name,
                why="an earlier call failed, or the executor was closed",
            )
        try:
            if not self._ready:
                left = max(0.0, self._start_deadline - time.monotonic())
                self._collect("start", left, self._start_timeout_s, "executor.start_timeout_s")
                self._ready = True
            return self._request(method, messages, self._call_timeout_s, "executor.call_timeout_s")
        except BaseException:
            # Whatever it was (Ctrl-C too): answers are outstanding, so the channels are out of step.
            self.end()
            raise

    def _request(self, method: str, messages: list[Message], timeout_s: float, key: str) -> list[Any]:
        process = self._processes[0]
        try:
            for process, message in zip(self._processes, messages, strict=True):
                process.send(message)
        except BlockingIOError:
            raise self._silent([process], method, timeout_s, key) from None
        return self._collect(method, timeout_s, timeout_s, key)

    def _collect(self, method: str, left_s: float, timeout_s: float, key: str) -> list[Any]:
        """Await one answer of each rank: ``left_s`` from now, of the ``timeout_s`` that ``key`` allows."""
        results: list[Any] = [None] * self.size
        failures: dict[int, Failure | None] = {}  # by rank, in order of arrival; None: it died without a word
        pending: dict[Connection, int] = {process.connection: rank for rank, process in enumerate(self._processes)}
        deadline = time.monotonic() + left_s
        while pending:
            ready = wait(list(pending), min(POLL_S, max(0.0, deadline - time.monotonic())))
            gone = [connection for connection, rank in pending.items() if self._processes[rank].ended()]
            if not ready and not gone and time.monotonic() >= deadline:
                break
            for connection in [*ready, *(connection for connection in gone if connection not in ready)]:
                rank = pending.pop(connection)  # type: ignore[call-overload]
                answer = _receive(self._processes[rank])
                if answer is None or isinstance(answer, Failure):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
                    failures[rank] = answer
                else:
                    results[rank] = answer.value
        if failures:
            raise self._failed(failures, method)
        if pending:
            raise self._silent([self._processes[rank] for rank in pending.values()], method, timeout_s, key)
        return results

    def _failed(self, failures: dict[int, Failure | None], method: str) -> Exception:
        """Make the error for what was most likely the cause: a death without a word, else the first."""
        rank = next((rank for rank, failure in failures.items() if failure is None), next(iter(failures)))
        process, failure = self._processes[rank], failures[rank]
        doing = f"could not start engine {self._engine!r}" if method == "start" else f"failed in {method}()"
        others = sorted(set(failures) - {rank})
        also = f"\nafter it failed: ranks {', '.join(map(str, others))}" if others else ""
        if failure is None:
            process.wait(LAST_WORDS_S)
            fate, tail = process.fate(), process.log_tail()
            return WorkerError(
                f"{process.name} {doing}: {fate}",
                where=str(process.log),
                why=(f"the last lines it wrote:\n{tail}" if tail else "it wrote nothing") + also,
                fix="SIGKILL is mostly the kernel's answer to a lack of memory (see dmesg): lower "
                "engine.max_tokens_per_micro_batch or rollout.max_batch_size"
                if "SIGKILL" in fate
                else "",
            )
        error = WorkerError(f"{process.name} {doing}", where=str(process.log), why=failure.traceback + also)
        if failure.error is None:
            return error
        failure.error.__cause__ = error
        return failure.error

    def _silent(self, processes: list[WorkerProcess], method: str, timeout_s: float, key: str) -> WorkerError:
        for process in processes:
            process.write_stacks()
        time.sleep(STACKS_S)
        doing = f"did not build engine {self._engine!r}" if method == "start" else f"did not answer {method}()"
        tails = "\n".join(f"{process.name}:\n{process.log_tail()}" for process in processes)
        return WorkerError(
            f"{', '.join(process.name for process in processes)} {doing} within {timeout_s:g} s",
            where=", ".join(str(process.log) for process in processes),
            why=f"where its threads stand, at the end of the log:\n{tails}",
            fix=f"if it is only slow, raise {key}" if key else "",
        )


def _receive(process: WorkerProcess) -> Any:
    """Read the answer of a process; None if it ended without one."""
    try:
        if not process.connection.poll():
            return None
        return decode(process.connection.recv_bytes())
    except (EOFError, ConnectionResetError, BlockingIOError):
        return None
