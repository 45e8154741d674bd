"""Confine a process to computing, for libraries that evaluate text that a model wrote.

Libraries that check answers are not safe against hostile answers: scorers of reasoning-gym call ``eval`` on them, and
so does ``sympy.parse_expr``. Code in a confined process can open no connection, start no program, signal no other
process and change no file. It can read files, and write only to its channel to the driver.
"""

from __future__ import annotations

from anytron.task.isolation.allowed import verifier
from anytron.task.isolation.seccomp import allow_calls


def confine() -> None:
    """Drop, for good, all rights of this process that computing does not need. Call it after all imports.

    The process may still read files, start threads, and use its open files. A child that it has started before is not
    confined.

    Raises:
        OSError: The kernel does not support this.
    """
    allow_calls(verifier())
