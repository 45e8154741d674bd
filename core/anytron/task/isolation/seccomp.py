"""Restrict the system calls of this process for good: the kernel refuses all others.

This is a seccomp filter (https://docs.kernel.org/userspace-api/seccomp_filter.html). It needs no privileges, applies to
all threads and to programs that the process executes, and cannot be removed. It lists the allowed calls
(:mod:`anytron.task.isolation.allowed`); every other call is refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import TYPE_CHECKING

from anytron.task.isolation.call_numbers import MACHINES

if TYPE_CHECKING:
    from anytron.task.isolation.allowed import Rules, Where
    from anytron.task.isolation.call_numbers import Machine

_NUMBER, _AUDIT, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``; an argument has 8 bytes, the low half first."""
_LOAD, _AND, _JUMP, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_X32 = 0x40000000
"""Numbers from here on belong to another interface to the same calls (x32), which a list of numbers would miss."""
_SINCE_2019 = 424
"""From this number on, a call has the same number on all processors. Such calls, if not allowed, are refused with
``ENOSYS``, as by a kernel that is too old for them, since C libraries then do without. One is ``clone3``, whose
arguments are in memory, where a filter cannot look. Calls with lower numbers are refused with ``EPERM``."""
_ALL_THREADS, _NEW_LISTENER = 1, 8
"""``SECCOMP_FILTER_FLAG_TSYNC`` and ``SECCOMP_FILTER_FLAG_NEW_LISTENER``."""
_NO_NEW_PRIVILEGES = 38
"""``PR_SET_NO_NEW_PRIVS``: without it a filter needs privileges, as programs with set-user-ID could be misled."""

Instruction = tuple[int, int, int, int]
"""Code, how many instructions to skip if a test holds, how many if it does not, and an operand."""


def allow_calls(rules: Rules) -> None:
    """Allow only these system calls to this process, its threads and the programs that it executes.

    The kernel refuses other calls; a call of another architecture's interface ends the process.

    Raises:
        OSError: This kernel or processor has no such filter.
    """
    machine = _machine()
    _install(instructions(rules, machine.calls, machine.audit), machine, _ALL_THREADS)


def allow_calls_and_ask(rules: Rules) -> int | None:
    """Like :func:`allow_calls`, for a process with one thread; the kernel also reports each call that gets ``EPERM``.

    Returns:
        Descriptor on which the kernel asks (:func:`anytron.task.isolation.refusals.answer`). Once all its copies are
        closed, the kernel refuses calls with ``ENOSYS``. None if the kernel already asks an outer process about this
        one: then the effect is the same as of :func:`allow_calls`.

    Raises:
        OSError: This kernel or processor has no such filter.
    """
    machine = _machine()
    try:
        return _install(instructions(rules, machine.calls, machine.audit, refusal=_ASK), machine, _NEW_LISTENER)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    allow_calls(rules)
    return None


def _machine() -> Machine:
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, f"the system calls of {os.uname().machine} are not known")
    return machine


def instructions(
    rules: Rules, calls: dict[str, int], audit: int, refusal: int = _REFUSE | errno.EPERM
) -> list[Instruction]:
    """Translate rules to the filter of an architecture; rules for calls that the architecture lacks are left out.

    Args:
        rules: The allowed calls.
        calls: Call numbers of the architecture.
        audit: The kernel's constant for the architecture.
        refusal: Action for native calls of the processor that are not allowed.
    """
    refused = [
        *((_AT_LEAST, 0, 1, _SINCE_2019), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)),
        (_RETURN, 0, 0, refusal),
    ]
    bodies = {
        calls[name]: [step for condition in conditions for step in _unless(condition, refusal)]
        for name, conditions in rules.items()
        if name in calls
    }
    free = _runs({number for number, body in bodies.items() if not body})
    parts = [(run.start, _allowed(run, [])) for run in free]
    parts += [(number, _allowed(range(number, number + 1), body)) for number, body in bodies.items() if body]
    return [
        *((_LOAD, 0, 0, _AUDIT), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)),
        *((_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)),
        *_search(sorted(parts), refused),
    ]


def _runs(numbers: set[int]) -> list[range]:
    """Group numbers into ranges of consecutive numbers."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number + 1 for number in numbers if number + 1 not in numbers)
    return [range(start, end) for start, end in zip(starts, ends, strict=True)]


def _search(parts: list[tuple[int, list[Instruction]]], refused: list[Instruction]) -> list[Instruction]:
    """Make a binary search over parts, each with its first call number, since every call passes the filter."""
    if len(parts) == 1:
        return [*parts[0][1], *refused]
    middle = len(parts) // 2
    below, above = _search(parts[:middle], refused), _search(parts[middle:], refused)
    return [(_AT_LEAST, 0, 1, parts[middle][0]), (_JUMP, 0, 0, len(below)), *below, *above]


def _allowed(numbers: range, body: list[Instruction]) -> list[Instruction]:
    """Allow the calls of a range if ``body`` does not refuse them; other calls skip these instructions."""
    skip = len(body) + 1
    first, last = (_AT_LEAST, 0, skip + 1, numbers.start), (_AT_LEAST, skip, 0, numbers.stop)
    return [first, last, *body, (_RETURN, 0, 0, _ALLOW)]


def _unless(where: Where, refusal: int) -> list[Instruction]:
    """Refuse the call unless its argument has an allowed value; if it has, go on after these instructions."""
    count = len(where.values)
    return [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * where.argument + 4 * where.high),
        (_AND, 0, 0, where.mask),
        *((_EQUAL, count - place, 0, value) for place, value in enumerate(where.values)),
        (_RETURN, 0, 0, refusal),
    ]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _install(instructions_: list[Instruction], machine: Machine, flags: int) -> int:
    filter_ = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions_)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses PR_SET_NO_NEW_PRIVS")
    set_filter = 1
    program = _Program(len(filter_) // 8, filter_)
    done = libc.syscall(machine.calls["seccomp"], set_filter, flags, ctypes.byref(program))
    if done < 0 or (done > 0 and flags == _ALL_THREADS):  # the number of a thread that has another filter
        raise OSError(ctypes.get_errno() or errno.EBUSY, "the kernel refuses filters of system calls (seccomp)")
    return int(done)
