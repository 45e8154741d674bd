"""The system calls that are allowed for programs that a model wrote, and for libraries that evaluate a model's text.

A call that is not listed here is refused, also a call of a newer kernel. The listed calls compute, read files, wait,
and start threads. They cannot send data to another process, start a process, or take memory beyond the limits.

To find out which calls are missing for a library: ``python -m tests.core.task.isolation.record COMMAND``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class Where(NamedTuple):
    """What an argument of a call must be: ``argument & mask`` must be one of ``values``.

    Attributes:
        argument: Position of the argument, from 0.
        mask: At most 32 bits; the upper half of the argument is ignored, as the kernel does for an ``int``.
        values: Allowed values.
        high: Whether to check the upper half instead: both halves of a null address must be 0.
    """

    argument: int
    mask: int
    values: tuple[int, ...]
    high: bool = False


Rules = Mapping[str, tuple[Where, ...]]
"""The conditions of each allowed call, by its name: all must hold; a call without conditions is always allowed."""

_ALL = 0xFFFFFFFF
_FREE = (
    # files that are open, pipes, waiting
    "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 close close_range lseek fsync fdatasync "
    "ftruncate dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait "
    "epoll_pwait epoll_pwait2 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4 "
    "sendfile copy_file_range fadvise64 readahead "
    # files by name, to read
    "stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir getdents "
    "getdents64 statfs fstatfs getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr umask "
    # memory; RLIMIT_AS or RLIMIT_DATA count it
    "munmap mprotect mremap madvise brk mincore msync mlock mlock2 munlock get_mempolicy "
    # time, signals to itself
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack restart_syscall "
    "pause alarm setitimer getitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times "
    "timer_create timer_settime timer_gettime timer_getoverrun timer_delete "
    # itself, its threads, the machine
    "futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list get_robust_list set_tid_address rseq "
    "membarrier exit exit_group wait4 waitid sched_yield sched_getaffinity sched_getparam sched_getscheduler "
    "sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority getrlimit setrlimit getrusage "
    "getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid uname "
    "sysinfo getcpu getrandom arch_prctl capget "
    # both ends of a socket pair, which reach each other alone
    "recvfrom recvmsg shutdown getsockname getpeername getsockopt"
)
_FILES = (
    "creat unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir link linkat symlink symlinkat truncate chmod "
    "fchmod fchmodat fchmodat2 utime utimes futimesat utimensat open openat"
)
"""Calls that change files, for a program that owns all files that it could change."""

_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020080
"""A thread; namespaces (``CLONE_NEW*``)."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_SHARED, _ANONYMOUS, _GROWS_DOWN = 0x01, 0x20, 0x100
"""Flags of ``mmap``. ``RLIMIT_DATA`` does not count memory that is shared and anonymous, or that grows down (stack)."""
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032, 1034)
"""``F_DUPFD``, ``F_GETFD``, ``F_SETFD``, ``F_GETFL``, ``F_SETFL``, ``F_DUPFD_CLOEXEC``, ``F_GETPIPE_SZ``,
``F_GET_SEALS``. Locks, leases, owners that get signals and larger pipes are refused."""
_FCNTL_LOCKS = (5, 6, 7)
"""``F_GETLK``, ``F_SETLK``, ``F_SETLKW``, which SQLite needs."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""``TCGETS`` and ``TIOCGWINSZ``, which ask for a terminal, ``FIONREAD``, ``FIONBIO``, ``FIONCLEX``, ``FIOCLEX``."""
_PRCTL = (3, 15, 16, 21, 23, 27, 30, 39, 0x53564D41)
"""``PR_GET_DUMPABLE``, ``PR_SET_NAME`` and ``PR_GET_NAME``, ``PR_GET_SECCOMP``, ``PR_CAPBSET_READ``,
``PR_GET_SECUREBITS``, ``PR_GET_TIMERSLACK``, ``PR_GET_NO_NEW_PRIVS``, ``PR_SET_VMA``."""


def verifier() -> Rules:
    """Return rules for an imported library: it may read files, but not change files or send anything.

    The rules are for the process that calls this function: it may send signals to itself only, and set its own limits
    only.
    """
    itself = (os.getpid(),)
    reading = {"open": (Where(1, _WRITING, (0,)),), "openat": (Where(2, _WRITING, (0,)),)}
    return {
        **dict.fromkeys(_FREE.split(), ()),
        **reading,
        "mmap": (Where(3, _SHARED | _ANONYMOUS | _GROWS_DOWN, (0, _SHARED, _ANONYMOUS)),),
        "clone": (Where(0, _CLONE_THREAD | _CLONE_NEW, (_CLONE_THREAD,)),),
        "fcntl": (Where(1, _ALL, _FCNTL),),
        "ioctl": (Where(1, _ALL, _IOCTL),),
        "prctl": (Where(0, _ALL, _PRCTL),),
        "kill": (Where(0, _ALL, itself),),
        "tgkill": (Where(0, _ALL, itself),),
        "prlimit64": (Where(0, _ALL, (0, *itself)),),
        "sched_setaffinity": (Where(0, _ALL, (0, *itself)),),
        "socketpair": (Where(0, _ALL, (_AF_UNIX,)), Where(1, _SOCK_TYPE, (_SOCK_STREAM,))),
        "sendto": (Where(4, _ALL, (0,)), Where(4, _ALL, (0,), high=True)),
    }


def program(*, own_files: bool, report: int) -> Rules:
    """Return rules for a program that is about to be executed.

    Args:
        own_files: Whether the program owns all files that it could change.
        report: Descriptor on which one message may be sent. It is closed when the program is executed; the program
            cannot open it again, because its number is above the limit of open files.
    """
    rules = {**verifier(), "execve": (), "mmap": ()}  # RLIMIT_AS counts all memory
    rules["sendmsg"] = (Where(0, _ALL, (report,)),)
    if own_files:
        rules |= dict.fromkeys(_FILES.split(), ())
        rules["fcntl"] = (Where(1, _ALL, _FCNTL + _FCNTL_LOCKS),)
    return rules
