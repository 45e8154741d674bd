"""Confine a process to computing: for libraries that evaluate what a model wrote.

Libraries that check answers are not written against hostile ones: scorers of reasoning-gym call ``eval`` on them, and
so does ``sympy.parse_expr``. What runs there then opens no connection, starts no program, signals nobody and changes no
file; it can read files, and has nobody to tell.
"""

from __future__ import annotations

from anytron.isolation.seccomp import EXECUTE, NEVER, refuse_calls


def confine() -> None:
    """Take from this process, for good, what computing does not need. All that it imports should be imported by now.

    Raises:
        OSError: The kernel cannot.
    """
    refuse_calls(NEVER | EXECUTE, processes=False, signals=False, writing=False)
