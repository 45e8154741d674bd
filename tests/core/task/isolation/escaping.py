"""Try what a filter must refuse, and again with a filter that lacks what refuses it: for tests.

Prints JSON: by profile, by attempt, how it ended with the whole filter and with the sabotaged one: ``refused`` if the
kernel said ``EPERM`` or ``ENOSYS``, else ``through``. Each is tried in a child, since a filter cannot be removed.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import socket
import sys
import tempfile
from pathlib import Path

from anytron.task.isolation import allowed, seccomp
from anytron.task.isolation.call_numbers import MACHINES

FOLDER = Path(tempfile.mkdtemp())
FILE = FOLDER / "file"
FILE.write_text("mine", encoding="utf-8")
ACCOMPLICE = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ACCOMPLICE.bind(str(FOLDER / "accomplice"))
ENDS = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # made before: what sockets there are is not all
STRANGER = socket.socket(socket.AF_UNIX)
SERVER = socket.socket(socket.AF_UNIX)
SERVER.bind(str(FOLDER / "server"))
SERVER.listen()
READ = os.open(FILE, os.O_RDONLY)
PIPE = os.pipe()
PARENT = os.getpid()
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # of calls that no list allows, for x86_64 and aarch64
    "sendmsg": (46, 211), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "socket": (41, 198),
    "setsockopt": (54, 208), "flock": (73, 32), "inotify_init1": (294, 26), "memfd_create": (319, 279),
    "setpriority": (141, 140), "ptrace": (101, 117), "unshare": (272, 97), "execve": (59, 221),
    "unlink": (87, None), "unlinkat": (263, 35), "chmod": (90, None), "fchmodat": (268, 53),
}  # fmt: skip


def done(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")


def flags_of_file():
    fcntl.ioctl(READ, 0x40086602, (0x40).to_bytes(8, "little"))  # FS_IOC_SETFLAGS


ATTEMPTS = {
    "send to an address": (lambda: ENDS[0].sendto(b"hush", str(FOLDER / "accomplice")), ["sendto"]),
    "a message to an address": (lambda: ENDS[0].sendmsg([b"hush"], [], 0, str(FOLDER / "accomplice")), ["sendmsg"]),
    "pass a file": (lambda: socket.send_fds(ENDS[0], [b"x"], [READ]), ["sendmsg"]),
    "make a socket file": (lambda: STRANGER.bind(str(FOLDER / "made")), ["bind"]),
    "connect": (lambda: STRANGER.connect(str(FOLDER / "server")), ["connect"]),
    "listen": (lambda: SERVER.listen(9), ["listen"]),
    "a socket": (socket.socket, ["socket"]),
    "a pair of sockets that sends to others": (
        lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), ["socketpair"],
    ),
    "larger buffers": (lambda: ENDS[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20), ["setsockopt"]),
    "a larger pipe": (lambda: fcntl.fcntl(PIPE[1], 1031, 1 << 17), ["fcntl"]),
    "flags of a file": (flags_of_file, ["ioctl"]),
    "signals of a pipe": (lambda: fcntl.ioctl(PIPE[0], 0x5452, (0).to_bytes(4, "little")), ["ioctl"]),  # FIOASYNC
    "a lock": (lambda: fcntl.flock(READ, fcntl.LOCK_EX | fcntl.LOCK_NB), ["flock"]),
    "an owner of signals": (lambda: fcntl.fcntl(PIPE[0], fcntl.F_SETOWN, PARENT), ["fcntl"]),
    "a signal to another": (lambda: os.kill(PARENT, 0), ["kill"]),
    "a signal to a thread of another": (lambda: done(libc.tgkill(PARENT, PARENT, 0)), ["tgkill"]),
    "a limit of another": (lambda: resource.prlimit(PARENT, resource.RLIMIT_CORE, (0, 0)), ["prlimit64"]),
    "processors of another": (lambda: os.sched_setaffinity(PARENT, os.sched_getaffinity(0)), ["sched_setaffinity"]),
    "another's priority": (lambda: os.setpriority(os.PRIO_PROCESS, PARENT, 1), ["setpriority"]),
    "a process": (lambda: os.fork() or os._exit(0), ["clone"]),
    "a namespace": (lambda: done(libc.unshare(0x10000000)), ["unshare"]),
    "watches": (lambda: done(libc.inotify_init1(0)), ["inotify_init1"]),
    "memory without a name": (lambda: os.memfd_create("x"), ["memfd_create"]),
    "not to die with its parent": (lambda: done(libc.prctl(1, 0, 0, 0, 0)), ["prctl"]),
    "tracing": (lambda: done(libc.ptrace(0, 0, 0, 0)), ["ptrace"]),
}  # fmt: skip
NOT_WITH_OWN_FILES = {
    "write": (lambda: os.open(FILE, os.O_WRONLY), ["openat", "open"]),
    "empty a file": (lambda: os.open(FILE, os.O_TRUNC), ["openat", "open"]),
    "mode of a file": (lambda: FILE.chmod(0o600), ["chmod", "fchmodat"]),
    "remove a file": (FILE.unlink, ["unlink", "unlinkat"]),
    "a lock of a part": (lambda: fcntl.lockf(READ, fcntl.LOCK_SH | fcntl.LOCK_NB), ["fcntl"]),
}
NOT_VERIFIERS = {
    "a program": (lambda: os.execv("/bin/true", ["true"]), ["execve"]),
    "memory that is not counted": (lambda: mmap.mmap(-1, 4096), ["mmap"]),
    "memory that is counted as stack": (
        lambda: mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100),  # MAP_GROWSDOWN
        ["mmap"],
    ),
}
PROFILES = {
    "full": (lambda: allowed.program(own_files=True, report=64), ATTEMPTS),
    "reduced": (lambda: allowed.program(own_files=False, report=64), ATTEMPTS | NOT_WITH_OWN_FILES),
    "verifier": (allowed.verifier, ATTEMPTS | NOT_WITH_OWN_FILES | NOT_VERIFIERS),
}


def ended(rules, attempt, sabotage):
    """How an attempt ends in a child, with these calls allowed whatever their arguments are."""
    FILE.touch()  # sabotaged, one removes it
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {0: "through", 1: "refused"}.get(status, f"status {status}")
    try:
        os.umask(0)
        seccomp.allow_calls(rules() | dict.fromkeys(sabotage, ()))
        attempt()
        os._exit(0)
    except OSError as error:
        os._exit(int(error.errno in (errno.EPERM, errno.ENOSYS)))
    except BaseException:  # noqa: BLE001 - this child must not go on
        os._exit(2)


machine = MACHINES[os.uname().machine]
column = list(MACHINES).index(os.uname().machine)
machine.calls.update({name: found[column] for name, found in NUMBERS.items() if found[column] is not None})
print(
    json.dumps(
        {
            profile: {
                name: [ended(rules, attempt, ()), ended(rules, attempt, sabotage)]
                for name, (attempt, sabotage) in attempts.items()
            }
            for profile, (rules, attempts) in PROFILES.items()
        }
    )
)
for one in FOLDER.iterdir():
    one.unlink()
FOLDER.rmdir()
sys.exit()
