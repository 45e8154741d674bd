"""A confined process that reads untrusted files, within limits; its answers are checked.

Libraries that parse tokenizers, templates, tables and pictures are not safe against hostile files: they abort, compute
without end or take all memory. So they run in a child of the driver. The child has no open files of the driver, and can
open no connection, start no program, signal no process and change no file (:mod:`anytron.task.isolation.confined`).
Its memory and its CPU time without progress are limited. The driver waits for it and can be interrupted at any time.
The answers are plain data.

The child is forked, so that modules need not be imported again, and objects that the user's own functions made need not
be sent.
"""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NoReturn

from anytron.base.errors import AnytronError, ConfigError, DataError, ResourceError
from anytron.base.files import exhausted
from anytron.task.isolation.confined import confine
from anytron.task.isolation.failure import ending
from anytron.task.isolation.plain import packed, unpacked
from anytron.task.isolation.progress import Progress
from anytron.task.isolation.worker import end_with_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Note = Callable[[], None]
    """Function that reports that the child has made progress: its time begins anew."""
    Service = Callable[[Any, Note], Iterator[Any]]
    """Function ``(call, note)`` that yields plain values. It runs in the child, where it may keep what it loads."""

MEMORY = 1 << 30
"""Bytes that the child may allocate."""
COMPUTE_S = 6.0
"""Seconds of processor time, of all threads together, within which the child must make progress."""
WAIT_S = 300.0
"""Seconds by the clock within which the child must make progress, even if it waits for a disk."""
MESSAGE_S = 5.0
"""Seconds that the child may take to write or read the next part of a message, or to end after closing its channel."""
LARGEST_FRAME = 1 << 28
"""Bytes of the longest message that the driver reads."""
SAID = 1 << 20
"""Most bytes that libraries may write to stderr; the last line is shown when the child is gone."""
_TICK_S = 0.1
_ANY_FILE = 1 << 20
"""Above the number of any open file."""
_TOO_MUCH = "reading it needs more memory than the reading process may use"
_LESS = "make the rows shorter, or the images fewer or smaller"
_KINDS: dict[str, type[AnytronError]] = {kind.__name__: kind for kind in (ConfigError, DataError, ResourceError)}


@dataclass(frozen=True)
class Errand:
    """Description of what the child is to read, for the error if that fails.

    Attributes:
        kind: Class of the error.
        what: What failed, as a sentence.
        where: The file, directory or key.
        fix: How to solve the problem.
    """

    kind: type[AnytronError]
    what: str
    where: str
    fix: str

    def failed(self, why: str) -> AnytronError:
        """Return the error, with this cause."""
        return self.kind(self.what, where=self.where, why=why, fix=self.fix)


class ConfinedReader:
    """Sends calls to a confined child process, which is started for the first call, and again after it has ended.

    Args:
        service: Function that answers calls.
        memory: Most bytes that the child may allocate; by default ``MEMORY``.
        compute_s: Seconds of CPU time within which the child must make progress; by default ``COMPUTE_S``.
    """

    def __init__(self, service: Service, memory: int | None = None, compute_s: float | None = None) -> None:
        self._service, self._memory, self._compute_s = service, memory or MEMORY, compute_s or COMPUTE_S
        self._child: _Child | None = None

    def ask(self, call: Any, errand: Errand) -> Iterator[Any]:
        """Make a call and yield the values of its answer. Stopping early ends the child.

        Args:
            call: Argument of the service; picklable.
            errand: Description of what is read.

        Raises:
            AnytronError: An error of the errand's kind, or the AnytronError that the service raised.
        """
        child = self._child = self._child or _Child(self._service, self._memory, self._compute_s, errand)
        whole = False
        try:
            child.send(call, errand)
            while (frame := child.receive(errand)) is not None:
                yield frame
            whole = True
        except _Told as told:
            whole = True
            raise told.error from None
        finally:
            if not whole:
                self.close()

    @property
    def alive(self) -> bool:
        """Whether there is a child. After an error: True if the child itself has sent the error, and can go on."""
        return self._child is not None

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.end()
            self._child = None


class _Told(Exception):  # noqa: N818 - it is the child's way to say an error, after which it goes on
    def __init__(self, error: AnytronError) -> None:
        self.error = error


class _Child:
    """The driver's side of one forked process."""

    def __init__(self, service: Service, memory: int, compute_s: float, errand: Errand) -> None:
        self._memory, self._compute_s = memory, compute_s
        self._said = os.memfd_create("anytron-reader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._said, SAID)
        fcntl.fcntl(self._said, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._progress = Progress(descriptor := Progress.made())
        os.close(descriptor)
        ours, theirs = socket.socketpair()
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", int(MESSAGE_S), 0))
        lifeline, self._lifeline = os.pipe()
        try:
            self.pid = _forked()
        except OSError as error:
            for descriptor in (lifeline, self._lifeline, self._said):
                os.close(descriptor)
            self._progress.close()
            raise errand.failed(f"no process could be started to read it: {error}") from error
        if self.pid == 0:
            _become(service, memory, (theirs.detach(), lifeline, self._said), self._progress)
        theirs.close()
        os.close(lifeline)
        self._connection = Connection(ours.detach())
        self._finish = weakref.finalize(self, _end, self.pid, os.getpid(), (self._lifeline, self._said))

    def send(self, call: Any, errand: Errand) -> None:
        try:
            frame = pickle.dumps(call, protocol=5)
        except Exception as error:  # an object may refuse to be pickled in any way
            raise errand.failed(f"it cannot be sent to the reading process: {error}") from error
        self._progress.begin()
        try:
            self._connection.send_bytes(frame)
        except BlockingIOError as error:
            raise errand.failed(f"the reading process has accepted no data for {MESSAGE_S:g} s") from error
        except (BrokenPipeError, ConnectionResetError):
            pass  # receive() finds how it ended

    def receive(self, errand: Errand) -> Any:
        """Wait for the next value; None = that was all."""
        self._wait(errand)
        try:
            kind, value = unpacked(self._connection.recv_bytes(LARGEST_FRAME))
            if kind == "value":
                return value
            if kind == "end":
                return None
            if kind == "error":
                name, what, where, why, fix = map(str, value)
                raise _Told(_KINDS[name](what, where=where or errand.where, why=why, fix=fix))
            if kind == "failed":
                raise _Told(errand.failed(str(value)))
            raise ValueError(f"a message of the kind {str(kind)[:60]!r}")  # noqa: TRY301 - one way to say it
        except (EOFError, OSError) as error:
            raise errand.failed(self._fate()) from error
        except (ValueError, TypeError, KeyError) as error:
            raise errand.failed(f"the reading process wrote an invalid answer: {error}") from error

    def _wait(self, errand: Errand) -> None:
        since, position, computed = monotonic(), self._progress.since, _computed(self.pid)
        while not self._connection.poll(_TICK_S):
            if self._progress.since != position:
                since, position, computed = monotonic(), self._progress.since, _computed(self.pid)
            if _computed(self.pid) - computed > self._compute_s:
                late = f"computed for {self._compute_s:g} s without progress, and was ended"
                raise errand.failed(f"the reading process {late}")
            if monotonic() - since > WAIT_S:
                raise errand.failed(f"the reading process made no progress for {WAIT_S:g} s, and was ended")

    def _fate(self) -> str:
        """Describe how the child ended."""
        end = monotonic() + MESSAGE_S
        # Without reaping: the number stays the child's until _end() has used it.
        while (ended := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if monotonic() > end:
                return "the reading process wrote an incomplete answer, and was ended"
            sleep(0.01)
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        last = os.pread(self._said, SAID, 0).rstrip(b"\0").decode(errors="replace").strip().splitlines()[-1:]
        limit = f"its limit is {self._memory / 2**30:g} GiB of memory"
        if status == -signal.SIGKILL:
            limit = "the kernel does so when the machine's memory is full"
        return f"the reading process {ending(status)}{''.join(f' ({line})' for line in last)}; {limit}"

    def end(self) -> None:
        self._connection.close()
        self._progress.close()
        self._finish()


def _end(pid: int, parent: int, descriptors: tuple[int, ...]) -> None:
    if os.getpid() != parent:  # a fork of the driver's has the object too
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # its end was found out before
        os.waitpid(pid, 0)
    for descriptor in descriptors:
        os.close(descriptor)


def _computed(pid: int) -> float:
    """Seconds of processor time that a process has taken, all threads together; 0 if it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _forked() -> int:
    with warnings.catch_warnings():
        # Python warns where there are other threads: they may hold locks. The child takes none of the driver's.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(service: Service, memory: int, files: tuple[int, int, int], progress: Progress) -> NoReturn:
    """Be the child: answer calls until the driver is gone."""
    try:
        gc.freeze()  # collections need not look at, and so copy, what the driver has
        os.setsid()  # Ctrl-C is for the driver
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGVTALRM):
            signal.signal(number, signal.SIG_DFL)
        channel, lifeline = _alone(*files)
        end_with_driver(lifeline)
        _limit(memory)
        unconfined = ""
        try:
            confine()
        except OSError as error:
            unconfined = f"this machine cannot confine the reading process: {error}"
        _answer(Connection(channel), service, progress, unconfined)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the driver's program does not go on here
        with suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:SAID])
        os._exit(1)


def _alone(channel: int, lifeline: int, said: int) -> tuple[int, int]:
    """Leave no open file but these: nothing at 0 and 1, stderr at 2, the channel at 3, the lifeline at 4.

    All else is closed first: the driver may have as many files open as its limit allows.
    """
    begin = 0
    for one in sorted((channel, lifeline, said)):
        os.closerange(begin, one)
        begin = one + 1
    os.closerange(begin, _ANY_FILE)
    away = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 5) for one in (said, channel, lifeline)]
    for place, one in enumerate(away, start=2):
        os.dup2(one, place, inheritable=False)
    os.closerange(5, _ANY_FILE)
    os.closerange(0, 2)
    os.dup(os.open(os.devnull, os.O_RDWR))  # the lowest numbers that are free: 0 and 1
    return 3, 4


def _limit(memory: int) -> None:
    """Limit the memory that is allocated from now on."""
    data = int(Path("/proc/self/statm").read_bytes().split()[5]) * resource.getpagesize() + memory
    # Not RLIMIT_AS: see anytron.task.isolation.worker.
    for kind, limit in ((resource.RLIMIT_DATA, data), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
    with suppress(OSError):  # it is the first to go if the machine runs out of memory
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _answer(connection: Connection, service: Service, progress: Progress, unconfined: str) -> None:
    steps = iter(range(sys.maxsize))

    def note() -> None:
        progress.at(next(steps))

    def tell(kind: str, value: Any = None) -> None:
        connection.send_bytes(packed([kind, value]))
        note()

    while True:
        try:
            call = pickle.loads(connection.recv_bytes())  # noqa: S301 - the driver made it
        except EOFError:
            return
        try:
            if unconfined:
                raise OSError(unconfined)  # noqa: TRY301 - told as any other error
            for value in service(call, note):
                tell("value", value)
            tell("end")
        except MemoryError:
            tell("failed", _TOO_MUCH)
        except BaseException as error:  # noqa: BLE001 - a library's panic is no Exception
            known = _known(error)
            if known is None:
                tell("failed", f"{type(error).__name__}: {error}"[:2000])
            else:
                tell("error", [type(known).__name__, known.what, known.where, known.why, known.fix])


def _known(error: BaseException) -> AnytronError | None:
    """Find the error to show to a person: one that names a resource that ran out comes first."""
    causes, one = [error], error
    while (cause := one.__cause__) is not None and cause not in causes:
        causes.append(one := cause)
    if lacking := next(filter(None, map(exhausted, causes)), None):
        return lacking
    if isinstance(error, AnytronError) and any(isinstance(cause, MemoryError) for cause in causes):
        fix = error.fix if "memory" in error.why else _LESS  # whoever has noticed it knows what would help
        return type(error)(error.what, where=error.where, why=_TOO_MUCH, fix=fix)
    return error if isinstance(error, AnytronError) else None
