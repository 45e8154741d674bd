"""The processes of one engine: calls to all ranks, and the handling of failures."""

from __future__ import annotations

import abc
import logging
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Generic

from anytron.base.errors import ProcessLost, WorkerError
from anytron.base.files import exhausted
from anytron.workers.executor.channel import Call, Failure, Message, Rebuild, Stop, decode, encode
from anytron.workers.executor.pending import AnyRank, Awaited, PendingCall
from anytron.workers.executor.stall import StallWatch, names

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from anytron.config.running import ExecutorSection
    from anytron.config.schema import RunConfig
    from anytron.workers.executor.protocol import Host, Share
    from anytron.workers.executor.stall import Held

    _Steps = Generator[Awaited[AnyRank], Sequence[AnyRank], list[Any]]

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""Seconds that a group waits for answers of its other ranks after one has failed."""
PEER_LOST_S = 15.0
"""Seconds that a group waits instead while all failures are lost connections to a peer: a rank that was killed makes
its peers fail in their collectives, and on a busy machine its own end may be noticed much later."""
_PEER_LOST = re.compile(r"(?i)by peer|broken pipe|remote process exited|connection (closed|reset|lost)")
STACKS_S = 0.5
"""How long a rank that does not answer gets to write its stacks."""
CLOSE_S = 10.0
"""How long an engine may take to close."""


class RankGroup(abc.ABC, Generic[AnyRank]):
    """A :class:`~anytron.workers.executor.protocol.WorkerGroup` whose processes may be on any machine.

    Args:
        engine: Name of the engine, for messages.
        ranks: Ranks in order, just started.
        settings: The time limits of starts, of calls, and of ranks that wait for each other.
    """

    def __init__(self, engine: str, ranks: Sequence[AnyRank], settings: ExecutorSection) -> None:
        self._engine = engine
        self._ranks = ranks
        self._settings = settings
        self._start_deadline = time.monotonic() + settings.start_timeout_s
        self._ready = False
        self._ended = False
        self._answers = 0
        self._last: PendingCall[AnyRank] | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    @property
    @abc.abstractmethod
    def hosts(self) -> Sequence[Host]:
        """The machine of each rank."""

    @property
    def ended(self) -> bool:
        """Whether the processes have ended: a call failed, or the group was closed."""
        return self._ended

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingCall[AnyRank]:
        """Call a method on all ranks without waiting for the answers."""
        return self._submit(method, encode(Call(method, args, kwargs)))

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks with the same arguments."""
        return self.submit(method, *args, **kwargs).result()

    def submit_each(self, method: str, shares: Iterable[Share[tuple[Any, ...]]]) -> PendingCall[AnyRank]:
        """Call a method on all ranks with different arguments, without waiting. One share is encoded at a time."""
        return self._submit(method, ((ranks, encode(Call(method, args, {}))) for ranks, args in shares))

    def scatter(self, method: str, shares: Iterable[Share[tuple[Any, ...]]]) -> list[Any]:
        """Call a method on all ranks with different arguments."""
        return self.submit_each(method, shares).result()

    def rebuild(self, config: RunConfig) -> None:
        """Build engines for another configuration in the same processes.

        The ranks meet in a new store, because the previous engines may not have released the old one.
        """
        self._submit("rebuild", encode(Rebuild(config.model_dump(mode="json"), self._new_store()))).result()

    def close(self) -> None:
        """Let every engine close, then end the processes. An engine whose process has ended already is skipped.

        If a call is in progress, or there has been no call yet, the processes are ended without closing their engines.

        Raises:
            WorkerError: An engine failed to close.
        """
        if self._ended:
            return
        try:
            if self._ready and not self._busy:
                steps = self._request("close", self._to_all(encode(Stop())), CLOSE_S, "")
                PendingCall("close", steps, self).result()
                deadline = time.monotonic() + CLOSE_S
                for rank in self._ranks:
                    rank.wait(max(0.0, deadline - time.monotonic()))
        except ProcessLost as error:
            logger.warning("%s", error.what)
        finally:
            self.end()

    def end(self) -> None:
        """End the processes without notifying their engines."""
        if not self._ended:
            self._ended = True
            self._end_all()

    def no_call(self, method: str) -> WorkerError:
        """Make the error for a call to processes that have ended."""
        return WorkerError(
            f"Method {method}() of engine {self._engine!r} cannot be called: its processes have ended.",
            where=self._ranks[0].name,
            why="an earlier call failed, or the executor was closed",
            fix="correct the cause of the first failure (see its error or the logs), and start the processes again",
        )

    @staticmethod
    @abc.abstractmethod
    def answered(ranks: Sequence[AnyRank], timeout_s: float) -> Sequence[AnyRank]:
        """Wait at most ``timeout_s`` seconds for a rank to answer, end or become silent; return all that have.

        The ranks may belong to several groups of this kind.
        """

    @abc.abstractmethod
    def _new_store(self) -> str:
        """Make an empty store where the ranks can meet; return its ``init_method``."""

    @abc.abstractmethod
    def _end_all(self) -> None:
        """End every process, whatever it does."""

    @property
    def _busy(self) -> bool:
        return self._last is not None and not self._last.done

    def _to_all(self, message: Message) -> list[Share[Message]]:
        return [(range(self.size), message)]

    def _carried(self, message: Message, receivers: int) -> Any:
        """Return the form in which a message is sent to a number of ranks."""
        del receivers
        return message

    def _submit(self, method: str, message: Message | Iterable[Share[Message]]) -> PendingCall[AnyRank]:
        if self._ended:
            raise self.no_call(method)
        if self._busy:
            raise RuntimeError(
                f"{method}() was called on engine {self._engine!r} while an earlier call was still running"
            )
        shares = self._to_all(message) if isinstance(message, Message) else message
        self._last = PendingCall(method, self._exchange(method, shares), self)
        return self._last

    def _exchange(self, method: str, shares: Iterable[Share[Message]]) -> _Steps[AnyRank]:
        if not self._ready:
            left = max(0.0, self._start_deadline - time.monotonic())
            yield from self._collect("start", left, self._settings.start_timeout_s, "executor.start_timeout_s")
            self._ready = True
        return (yield from self._request(method, shares, self._settings.call_timeout_s, "executor.call_timeout_s"))

    def _request(self, method: str, shares: Iterable[Share[Message]], timeout_s: float, key: str) -> _Steps[AnyRank]:
        rank, sent = 0, list[int]()
        try:
            for ranks, message in shares:
                carried = self._carried(message, len(ranks))
                for rank in ranks:
                    self._ranks[rank].send(carried)
                sent += ranks
        except BlockingIOError:
            raise self._failed({rank: None}, method) from None
        times = Counter(sent)
        if wrong := [rank for rank in range(self.size) if times[rank] != 1]:
            raise ValueError(f"{method}: ranks {wrong} get no arguments, or get them twice")
        return (yield from self._collect(method, timeout_s, timeout_s, key))

    def _collect(self, method: str, left_s: float, timeout_s: float, key: str) -> _Steps[AnyRank]:
        """Wait at most ``left_s`` for one answer of each rank; errors name the limit ``timeout_s`` and its ``key``."""
        results: list[Any] = [None] * self.size
        failures: dict[int, Failure | None] = {}  # by rank, in order of arrival; None: it died without a word
        first = 0.0  # when the first failure arrived
        pending = {rank: number for number, rank in enumerate(self._ranks)}
        deadline = time.monotonic() + left_s
        self._answers += 1
        watch = StallWatch(self._ranks, self._settings.stall_timeout_s, self._answers)
        while pending:
            ready = yield Awaited(list(pending), deadline)
            if not ready and time.monotonic() >= deadline:
                break
            for rank in ready:
                number, message = pending.pop(rank), rank.receive()
                answer = None if message is None else decode(message)
                if answer is None or isinstance(answer, Failure):
                    first = first or time.monotonic()
                    failures[number] = answer
                    deadline = min(deadline, first + _patience_s(failures.values()))
                else:
                    results[number] = answer.value
            if not failures and (held := watch.look(set(range(self.size)).difference(pending.values()))):
                raise self._stalled(watch, held, method)
        if failures:
            if None not in failures.values():
                # Its peers' collectives fail when a rank dies, which may have answered this call, or whose machine's
                # end may take long to be noticed.
                failures |= dict.fromkeys(self._gone(set(failures), set(pending.values())))
            raise self._failed(failures, method)
        if pending:
            raise self._silent(list(pending), method, timeout_s, key)
        return results

    def _gone(self, failed: set[int], pending: set[int]) -> list[int]:
        """Return at most one rank that ended without an error message and is not known to have failed."""
        for number, rank in enumerate(self._ranks):
            if number not in failed and rank.wait(0.0) and (number not in pending or rank.receive() is None):
                return [number]
        return []

    def _failed(self, failures: dict[int, Failure | None], method: str) -> Exception:
        """Make the error for the likeliest cause: a rank that died without an error message, else the first failure."""
        number = next((number for number, failure in failures.items() if failure is None), next(iter(failures)))
        rank, failure = self._ranks[number], failures[number]
        doing = f"could not start engine {self._engine!r}" if method == "start" else f"failed in {method}()"
        others = sorted(set(failures) - {number})
        also = f"\nfailed afterwards: ranks {', '.join(map(str, others))}" if others else ""
        if failure is None:
            ended = rank.wait(LAST_WORDS_S)
            fate = rank.fate()
            if not ended:
                rank.write_stacks()
                time.sleep(STACKS_S)
            tail = rank.log_tail()
            return ProcessLost(
                _sentence(f"{rank.name} {doing}: {fate}"),
                where=rank.where,
                why=(f"the last lines it wrote:\n{tail}" if tail else "it wrote nothing") + also,
                fix=_remedy(fate),
            )
        known = exhausted(RuntimeError(failure.traceback))
        fix = "" if known is None else known.fix
        error = WorkerError(_sentence(f"{rank.name} {doing}"), where=rank.where, why=failure.traceback + also, fix=fix)
        if failure.error is None:
            return error
        failure.error.__cause__ = error
        return failure.error

    def _stalled(self, watch: StallWatch[AnyRank], held: Mapping[int, Held], method: str) -> ProcessLost:
        missing = {number for holds in held.values() for number in holds.missing}
        for number in held.keys() | missing:
            self._ranks[number].write_stacks()
        time.sleep(STACKS_S)
        waiting, others = names(self._ranks, held), names(self._ranks, missing)
        return ProcessLost(
            _sentence(f"{waiting} would wait for ever in {method}(), in a collective that {others} never joined"),
            where=", ".join(self._ranks[number].where for number in sorted(held.keys() | missing)),
            why=watch.describe(held, method),
            fix="let all ranks of a group begin the same collectives in the same order, even with nothing to do "
            "(each log ends with the stacks of all threads); if the ranks were only slow, raise "
            "executor.stall_timeout_s",
        )

    def _silent(self, ranks: list[AnyRank], method: str, timeout_s: float, key: str) -> WorkerError:
        for rank in ranks:
            rank.write_stacks()
        time.sleep(STACKS_S)
        # Another start would take as long; what stands in a collective may well not do so a second time.
        kind, doing = (
            (WorkerError, f"did not build engine {self._engine!r}")
            if method == "start"
            else (ProcessLost, f"did not answer {method}()")
        )
        tails = "\n".join(f"{rank.name}:\n{rank.log_tail()}" for rank in ranks)
        return kind(
            _sentence(f"{', '.join(rank.name for rank in ranks)} {doing} within {timeout_s:g} s"),
            where=", ".join(rank.where for rank in ranks),
            why=f"the end of each log, which shows where the threads stand:\n{tails}",
            fix=f"if the ranks are only slow, raise {key}" if key else "",
        )


def _patience_s(failures: Iterable[Failure | None]) -> float:
    """Return the seconds to wait for answers of other ranks after the first failure."""
    complaints = all(failure is not None and _PEER_LOST.search(failure.traceback) for failure in failures)
    return PEER_LOST_S if complaints else LAST_WORDS_S


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _remedy(fate: str) -> str:
    if "SIGKILL" in fate:
        return (
            "the kernel mostly sends SIGKILL when memory runs out (see dmesg): lower "
            "engine.max_tokens_per_micro_batch or rollout.max_batch_size"
        )
    if "no sign of life" in fate:
        return (
            "if the process was only slow, in a library that holds Python's global interpreter lock, raise "
            "executor.heartbeat_timeout_s"
        )
    return "look for the cause in the log, also above its last lines"
