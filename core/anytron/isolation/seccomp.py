"""Take system calls away from this process for good: what the kernel refuses, no program can talk it into.

A filter of seccomp (https://docs.kernel.org/userspace-api/seccomp_filter.html). It needs no privileges, holds for all
threads and for what the process executes, and cannot be removed. A refused call fails with ``EPERM``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEVER = _names(
    "socket io_uring_setup ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd bpf userfaultfd "
    "perf_event_open add_key request_key keyctl unshare setns mount umount2 pivot_root chroot move_mount "
    "open_tree fsopen fsconfig fsmount mount_setattr shmget semget msgget mq_open memfd_create personality"
)
"""No network (``socket`` stands for all families; ``io_uring`` would get round it), no look into other processes, no
namespaces, and no memory that no limit counts."""
_SIGNALS = _names(
    "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal prlimit64 setpriority setsid setpgid"
)
"""What reaches other processes of the same user, where they are to be seen (``tgkill`` is one's own ``abort`` too); and
what leaves the process group that is killed as a whole."""
_OWNERS = {"fcntl": (8, 10, 15), "ioctl": (0x8901, 0x8902)}
"""``F_SETOWN``, ``F_SETSIG``, ``F_SETOWN_EX``; ``FIOSETOWN``, ``SIOCSPGRP``: the kernel sends the signal then."""
EXECUTE = _names("execve execveat")
_CHANGES = _names(
    "creat openat2 unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir link linkat symlink symlinkat "
    "truncate chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat mknod mknodat utime utimes futimesat "
    "utimensat setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat"
)
"""What changes files; beside these, ``open`` and ``openat`` where they would write."""

_X86_64 = (
    "socket 41 io_uring_setup 425 ptrace 101 process_vm_readv 310 process_vm_writev 311 pidfd_open 434 "
    "pidfd_getfd 438 bpf 321 userfaultfd 323 perf_event_open 298 add_key 248 request_key 249 keyctl 250 unshare "
    "272 setns 308 mount 165 umount2 166 pivot_root 155 chroot 161 move_mount 429 open_tree 428 fsopen 430 "
    "fsconfig 431 fsmount 432 mount_setattr 442 shmget 29 semget 64 msgget 68 mq_open 240 memfd_create 319 "
    "personality 135 kill 62 tkill 200 tgkill 234 fcntl 72 ioctl 16 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 "
    "pidfd_send_signal 424 prlimit64 302 setpriority 141 execve 59 execveat 322 creat 85 openat2 437 unlink 87 "
    "unlinkat 263 rename 82 renameat 264 renameat2 316 mkdir 83 mkdirat 258 rmdir 84 link 86 linkat 265 symlink "
    "88 symlinkat 266 truncate 76 chmod 90 fchmod 91 fchmodat 268 fchmodat2 452 chown 92 fchown 93 lchown 94 "
    "fchownat 260 mknod 133 mknodat 259 utime 132 utimes 235 futimesat 261 utimensat 280 setxattr 188 lsetxattr 189 "
    "fsetxattr 190 setxattrat 463 removexattr 197 lremovexattr 198 fremovexattr 199 removexattrat 466 setsid 112 "
    "setpgid 109 fork 57 vfork 58 clone 56 clone3 435 open 2 openat 257 seccomp 317"
)
_AARCH64 = (
    "socket 198 io_uring_setup 425 ptrace 117 process_vm_readv 270 process_vm_writev 271 pidfd_open 434 "
    "pidfd_getfd 438 bpf 280 userfaultfd 282 perf_event_open 241 add_key 217 request_key 218 keyctl 219 unshare "
    "97 setns 268 mount 40 umount2 39 pivot_root 41 chroot 51 move_mount 429 open_tree 428 fsopen 430 fsconfig "
    "431 fsmount 432 mount_setattr 442 shmget 194 semget 190 msgget 186 mq_open 180 memfd_create 279 personality "
    "92 kill 129 tkill 130 tgkill 131 fcntl 25 ioctl 29 rt_sigqueueinfo 138 rt_tgsigqueueinfo 240 "
    "pidfd_send_signal 424 prlimit64 261 setpriority 140 execve 221 execveat 281 openat2 437 unlinkat 35 renameat "
    "38 renameat2 276 mkdirat 34 linkat 37 symlinkat 36 truncate 45 fchmod 52 fchmodat 53 fchmodat2 452 fchown 55 "
    "fchownat 54 mknodat 33 utimensat 88 setxattr 5 lsetxattr 6 fsetxattr 7 setxattrat 463 removexattr 14 "
    "lremovexattr 15 fremovexattr 16 removexattrat 466 setsid 157 setpgid 154 clone 220 clone3 435 openat 56 "
    "seccomp 277"
)


@dataclass(frozen=True)
class _Machine:
    """Numbers of a processor's system calls, and how the kernel names it (``AUDIT_ARCH_*`` of ``linux/audit.h``)."""

    audit: int
    calls: dict[str, int]


def _machine(audit: int, table: str) -> _Machine:
    words = table.split()
    return _Machine(audit, dict(zip(words[::2], map(int, words[1::2]), strict=True)))


_MACHINES = {"x86_64": _machine(0xC000003E, _X86_64), "aarch64": _machine(0xC00000B7, _AARCH64)}

_NUMBER, _AUDIT, _ARGUMENTS = 0, 4, 16
"""Where in ``struct seccomp_data`` they stand; an argument is 8 bytes, the low half first."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""Numbers from here on are those of another interface to the same calls, which a list of numbers would miss."""
_CLONE_THREAD = 0x00010000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NO_NEW_PRIVILEGES = 38
"""``PR_SET_NO_NEW_PRIVS``: without it a filter needs privileges, as programs with set-user-ID could be misled."""


def refuse_calls(names: frozenset[str], *, processes: bool, signals: bool, writing: bool) -> None:
    """Have the kernel refuse system calls to this process, all its threads, and what it executes.

    Args:
        names: ``NEVER`` or ``EXECUTE``, or both.
        processes: Whether new processes may be started; threads always may.
        signals: Whether other processes may be signalled, and limited, and the process group left.
        writing: Whether files may be opened for writing, and changed by name.

    Raises:
        OSError: This kernel or processor has no such filter.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, f"system calls of {os.uname().machine} are not known here")
    calls = machine.calls
    program = [(_LOAD, 0, 0, _AUDIT), (_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    if not processes:
        names |= {"fork", "vfork"}
        # The arguments of clone3 are in memory, where no filter looks; the C library then takes clone.
        program += _refused(calls["clone3"], errno.ENOSYS)
        program += _unless(calls["clone"], 0, [(_ANY_BIT, _CLONE_THREAD)], allowed=True)
    if not signals:
        names |= _SIGNALS
        for name, values in _OWNERS.items():
            program += _unless(calls[name], 1, [(_EQUAL, value) for value in values], allowed=False)
    if not writing:
        names |= _CHANGES
        for name, argument in (("open", 1), ("openat", 2)):
            if name in calls:
                program += _unless(calls[name], argument, [(_ANY_BIT, _WRITING)], allowed=False)
    for name in sorted(names & calls.keys()):  # some are not on every processor
        program += _refused(calls[name], errno.EPERM)
    program.append((_RETURN, 0, 0, _ALLOW))
    _install(b"".join(struct.pack("=HBBI", *instruction) for instruction in program), calls["seccomp"])


_Instruction = tuple[int, int, int, int]
"""Code, how many to skip if a test holds, how many if it does not, and a number."""


def _refused(number: int, error: int) -> list[_Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | error)]


def _unless(number: int, argument: int, tests: list[tuple[int, int]], *, allowed: bool) -> list[_Instruction]:
    """Allow one call if a test of an argument holds, and refuse it otherwise; or the other way round.

    What follows finds the number loaded again.
    """
    refused = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    count = len(tests)
    checks = [
        (code, count - place if allowed else count - 1 - place, 0 if place < count - 1 else int(not allowed), value)
        for place, (code, value) in enumerate(tests)
    ]
    return [
        (_EQUAL, 0, count + 3, number),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        *checks,
        refused,
        (_LOAD, 0, 0, _NUMBER),
    ]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _install(filter_: bytes, seccomp: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS is refused")
    set_filter, all_threads = 1, 1
    program = _Program(len(filter_) // 8, filter_)
    if libc.syscall(seccomp, set_filter, all_threads, ctypes.byref(program)):
        raise OSError(ctypes.get_errno() or errno.EBUSY, "the kernel takes no filter of system calls (seccomp)")
