"""Count the refused system calls of a program by name: the kernel asks this process about each of them.

A filter alone refuses calls without any record. Counting costs nothing for a program without refused calls, and some
microseconds for each refused call (https://docs.kernel.org/userspace-api/seccomp_filter.html, "Userspace
Notification"). Memory to which the call's arguments point is not read, and no call is ever allowed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import struct
from typing import TYPE_CHECKING

from anytron.task.isolation.call_numbers import name_of

if TYPE_CHECKING:
    from collections import Counter

MOST = 1000
"""Most refused calls that are counted. Further calls are refused by the kernel alone, with ``ENOSYS``."""
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""``SECCOMP_IOCTL_NOTIF_RECV`` and ``SECCOMP_IOCTL_NOTIF_SEND``."""
_QUESTION_BYTES, _NUMBER = 80, 16
"""Size of ``struct seccomp_notif``, and place of the call's number in it. Its first 8 bytes are the question's id."""


def answer(listener: int, counted: Counter[str]) -> bool:
    """Refuse a call, and count it.

    Args:
        listener: Descriptor on which the kernel asks; it must be readable.
        counted: Refused calls by name.

    Returns:
        Whether more calls are to be answered.
    """
    question = bytearray(_QUESTION_BYTES)
    with contextlib.suppress(FileNotFoundError):  # a signal has ended the call meanwhile
        fcntl.ioctl(listener, _RECEIVE, question)
        counted[name_of(struct.unpack_from("=i", question, _NUMBER)[0])] += 1
        fcntl.ioctl(listener, _SEND, struct.pack("=8sqiI", bytes(question[:8]), 0, -errno.EPERM, 0))
    return counted.total() < MOST


def in_words(refused: Counter[str]) -> str:
    """Name refused calls and how many of each there were, most frequent first."""
    return ", ".join(f"{name} ({count})" for name, count in refused.most_common())
