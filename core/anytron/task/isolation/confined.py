"""Confine a process to computing: for libraries that evaluate what a model wrote.

Libraries that check answers are not written against hostile ones: scorers of reasoning-gym call ``eval`` on them, and
so does ``sympy.parse_expr``. What runs there then opens no connection, starts no program, signals no other process and
changes no file; it can read files, and has no channel but the one to the driver.
"""

from __future__ import annotations

from anytron.task.isolation.allowed import verifier
from anytron.task.isolation.seccomp import allow_calls


def confine() -> None:
    """Drop, for good, all rights of this process that computing does not need. Import everything before.

    It may still read files, start threads, and use what it has open. It is the process itself that is named in its
    filter: a child that it has started before is not confined.

    Raises:
        OSError: The kernel does not support this.
    """
    allow_calls(verifier())
