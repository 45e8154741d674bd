"""Check the interpreter of an environment in which a worker is to run."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from anytron.base.files import exhausted
from anytron.base.installing import installable
from anytron.base.version import __version__
from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator

_ASK = "import sys; sys.path[:] = filter(None, sys.path); import anytron; print(anytron.__version__)"
"""As a worker starts: nothing is imported from the current directory."""
_ANSWER_S = 60.0
"""Seconds that an interpreter may take to start, from a slow disk."""


def interpreter_diagnostics(key: str, python: str) -> Iterator[Diagnostic]:
    """Find out whether an interpreter starts, and has this version of Anytron.

    Args:
        key: The configuration key that names it.
        python: The interpreter.
    """
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ANSWER_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        if (known := exhausted(error, python)) is not None:
            raise known from error
        fix = "give the path of a Python interpreter, for example venv/bin/python"
        yield Diagnostic("error", key, f"{python} cannot be run: {error}", fix)
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        fix = f"{python} -m pip install {installable(__version__)}"
        yield Diagnostic("error", key, f"Anytron cannot be imported with {python}: {last}", fix)
    elif (found := done.stdout.strip()) != __version__:
        message = f"{python} has Anytron {found}, and this is {__version__}: what crosses between them has one version"
        yield Diagnostic("error", key, message, f"{python} -m pip install {installable(__version__)}")
