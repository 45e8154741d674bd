"""Run an untrusted Python program: within limits, without network, and without access to the machine's files.

There are three processes. The first enters new namespaces. The second, its child and the first process of the process
namespace, builds a file system in memory and starts the program, which is the third. When the second process ends, the
kernel ends all others in its namespace. The second process ends when the first one ends, and the first one when
the caller ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import signal
import socket
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, NoReturn

from anytron.task.isolation import allowed, namespaces
from anytron.task.isolation.refusals import answer, in_words
from anytron.task.isolation.seccomp import allow_calls_and_ask

GIB, MIB = 1 << 30, 1 << 20

Level = Literal["full", "reduced"]
"""``full``: separate namespaces of users (unless this process is root), processes, network, mounts and more; the
program sees the interpreter, libraries and an empty folder. ``reduced``: for machines without secrets that do not allow
``full``; the program reads all files that its user can read, and changes none, because by ``/proc/PID/mem`` it could
control its user's other processes. Both levels limit time, memory, output, network, processes and signals."""

THREADS = 256
"""Most threads and processes of a sandbox on the level ``full``; each sandbox is counted separately."""
FILES = 64
"""Most open files of the program."""
_REPORT = FILES
"""Descriptor of the socket to the caller, until the program is executed: a number that the program cannot open."""
_LISTENER = b"\0"
"""Byte that is sent with the descriptor on which the kernel asks."""
_PROGRAM = "exec(compile(open(3, 'rb').read(), 'program.py', 'exec'))"
_DIED = 1
_ENDED_WITH_US = 1
"""``PR_SET_PDEATHSIG``."""


class Unavailable(OSError):  # noqa: N818 - said of the sandbox
    """This machine cannot build the sandbox; the message names the step that failed."""


@dataclass(frozen=True)
class Ending:
    """How a program ended.

    Attributes:
        status: Exit status of the program; negative = minus the number of the signal that ended it.
        output: Standard output of the program, cut at the limit.
        late: Whether the program was killed because it took too long.
        refused: Number of refused system calls by name, as far as they were counted.
    """

    status: int
    output: bytes
    late: bool = False
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Sandbox:
    """Runs Python programs in a sandbox, with these limits.

    Attributes:
        level: Level of isolation.
        timeout_s: Seconds that the program may take, and seconds of CPU time that it may use.
        memory_gib: Limit of the program's address space, in GiB.
        output_mib: Limit of the program's output, in MiB; on the level ``full`` also of all its files together.
        site_packages: Whether the program may import packages that are installed for this interpreter.
    """

    level: Level
    timeout_s: float
    memory_gib: float
    output_mib: float
    site_packages: bool

    def run(self, program: str, given: str) -> Ending:
        """Run a program once.

        Args:
            program: Python source.
            given: Standard input of the program.

        Raises:
            Unavailable: The sandbox could not be built; nothing was run.
        """
        said, report = (end.detach() for end in socket.socketpair())
        source, stdin, stdout = (_memory(text) for text in (program, given, ""))
        try:
            caller = os.getpid()
            child = os.fork()
            if child == 0:
                self._enter(source, stdin, stdout, report, caller)
            os.close(report)
            report = -1
            try:
                late, refused = _wait(child, said, self.timeout_s)
            except BaseException:  # Ctrl-C, or no descriptor left
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise
            if late:
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            obstacle = b"" if late else os.read(said, 4096)
            if obstacle:
                raise Unavailable(obstacle.decode(errors="replace"))
            status = status - 256 if status > 128 else status
            return Ending(status, os.pread(stdout, self._output, 0), late, refused)
        finally:
            for descriptor in (said, report, source, stdin, stdout):
                if descriptor >= 0:
                    os.close(descriptor)

    @property
    def _output(self) -> int:
        return int(self.output_mib * MIB)

    def _enter(self, source: int, stdin: int, stdout: int, report: int, caller: int) -> NoReturn:
        """Become the process that waits for the sandbox; or, in the sandbox, the program."""
        step = "it could not be started"
        try:
            python = sys.executable if self.site_packages else os.path.realpath(sys.executable)
            _end_with(caller)
            os.umask(0o022)  # who becomes a stranger must still see what is built here
            stranger = namespaces.stranger()
            if self.level == "full":
                step = "separate namespaces"
                namespaces.enter()
                _as_first_process(report)
                step = "a separate file system"
                namespaces.replace_files(_visible(self.site_packages), limit=self._output)
                _as_child(report)
                os.setsid()  # a signal to its process group knows no namespace
            else:
                os.chdir("/")
            step = "limits"
            descriptors = {source: 3, stdin: 0, stdout: 1}
            _arrange(descriptors, report)
            report = _REPORT
            self._limit()
            namespaces.drop_root(*stranger)
            if self.level == "reduced":
                _end_with(caller)  # the kernel forgets it when root becomes somebody else
            step = "a filter of system calls"
            listener = allow_calls_and_ask(allowed.program(own_files=self.level == "full", report=report))
            if listener is not None:  # the caller answers from here on
                caller_end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=report)
                socket.send_fds(caller_end, [_LISTENER], [listener])
                caller_end.detach()
            step = "the interpreter"
            _execute(python, self.site_packages)
        except BaseException as error:  # noqa: BLE001 - whatever it is, this process must not return
            with suppress(OSError):
                os.write(report, f"{step}: {error}".encode()[:4096])
            os._exit(_DIED)

    def _limit(self) -> None:
        memory, seconds = int(self.memory_gib * GIB), max(1, int(self.timeout_s + 0.999))
        for kind, limit in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, self._output),
            (resource.RLIMIT_NOFILE, FILES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            _lower(kind, limit)
        if self.level == "full":
            _lower(resource.RLIMIT_NPROC, THREADS)


def _lower(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _memory(text: str) -> int:
    """Make a file without a name that holds a text, and is read from its beginning."""
    descriptor = os.memfd_create("anytron-sandbox")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text.encode(errors="replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _wait(child: int, said: int, seconds: float) -> tuple[bool, Counter[str]]:
    """Wait for the end of a child, and meanwhile refuse and count calls of its program.

    Args:
        child: The process that waits for the sandbox.
        said: Socket on which the program's process sends the descriptor on which the kernel asks, or an error, which is
            left unread.
        seconds: Longest time to wait.

    Returns:
        Whether it took longer; refused calls by name.
    """
    process, listener, counted = os.pidfd_open(child), -1, Counter[str]()
    waited, end = select.poll(), monotonic() + seconds
    waited.register(process, select.POLLIN)
    waited.register(said, select.POLLIN)
    try:
        while (rest := end - monotonic()) > 0:
            ready = dict(waited.poll(1000 * rest))
            if said in ready:  # first: the byte that stays unread would be taken for an obstacle
                waited.unregister(said)
                listener = _listener(said)
                if listener >= 0:
                    waited.register(listener, select.POLLIN)
            elif process in ready:
                break
            elif listener in ready and (ready[listener] != select.POLLIN or not answer(listener, counted)):
                waited.unregister(listener)
                os.close(listener)
                listener = -1
        return rest <= 0, counted
    finally:
        os.close(process)
        if listener >= 0:
            os.close(listener)


def _listener(said: int) -> int:
    """Receive the descriptor on which the kernel asks; -1 if there is another message, or the socket is closed."""
    with socket.socket(fileno=os.dup(said)) as from_child:
        if from_child.recv(1, socket.MSG_PEEK) != _LISTENER:
            return -1
        received = socket.recv_fds(from_child, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]
    if not received:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return received[0]


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    namespaces.control(_ENDED_WITH_US, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(_DIED)


def _as_first_process(report: int) -> None:
    """Go on as a child, the first process of its namespace. Its parent waits, and ends as it does."""
    lifeline, end = os.pipe()  # from here nobody sees the parent's number
    _as_child(report)
    os.close(end)
    namespaces.control(_ENDED_WITH_US, signal.SIGKILL)
    if select.select([lifeline], [], [], 0.0)[0]:  # it had ended before
        os._exit(_DIED)


def _as_child(report: int) -> None:
    """Fork and return in the child; the parent waits and exits with the child's status."""
    child = os.fork()
    if child == 0:
        return
    os.close(report)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 256 + status)


def _arrange(descriptors: dict[int, int], report: int) -> None:
    """Leave no open file but these: 0 and 1, nothing at 2, the program at 3, the report, which ends with ``exec``."""
    places = {**descriptors, os.open("/dev/null", os.O_WRONLY): 2, report: _REPORT}
    # Numbers that nobody has: those who called may have any number of files open.
    away = {fcntl.fcntl(descriptor, fcntl.F_DUPFD, _REPORT + 1): place for descriptor, place in places.items()}
    for descriptor, place in away.items():
        os.dup2(descriptor, place, inheritable=place != _REPORT)
    os.closerange(4, _REPORT)
    os.closerange(_REPORT + 1, 1 << 20)


def _visible(site_packages: bool) -> list[str]:
    """Paths that the interpreter needs."""
    system = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf"]
    prefixes = [sys.base_prefix, sys.base_exec_prefix]
    if site_packages:
        prefixes += [sys.prefix, sys.exec_prefix]
    executable = [os.path.dirname(os.path.realpath(sys.executable))]  # noqa: PTH120 - light to import
    return sorted({path for path in [*system, *prefixes, *executable] if path != "/"})


def _execute(python: str, site_packages: bool) -> NoReturn:
    options = ["-I", "-B", "-X", "utf8"] + ([] if site_packages else ["-S"])
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    environment = {"HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **threads}  # noqa: S108
    os.execve(python, [python, *options, "-c", _PROGRAM], environment)  # noqa: S606 - this interpreter


def try_out() -> None:
    """Run an empty program in the sandbox that this process's arguments describe; exit with a message if it fails."""
    level, *numbers = sys.argv[1:]
    timeout_s, memory_gib, output_mib, site_packages = map(float, numbers)
    try:
        ending = Sandbox(
            "full" if level == "full" else "reduced", timeout_s, memory_gib, output_mib, bool(site_packages)
        ).run("pass", "")
    except Unavailable as error:
        sys.exit(str(error))
    if ending.late or ending.status:
        refused = f"; refused: {in_words(ending.refused)}" if ending.refused else ""
        sys.exit(f"Python in the sandbox ended with status {ending.status}; it may need a larger memory_gib{refused}")
