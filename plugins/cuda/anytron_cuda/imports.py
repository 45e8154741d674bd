"""Try imports in a process of their own: this one stays free of what they load, and of CUDA."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

IMPORT_S = 300.0
"""Seconds that an import may take, from a slow disk."""
_IMPORT = "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[2]); importlib.import_module(sys.argv[1])"


@functools.cache
def import_error(module: str) -> str:
    """Say why a module cannot be imported; empty if it can, or was.

    A library that was built for another torch, or another CUDA, is found by this: its symbols are missing.
    """
    if module in sys.modules:
        return ""
    command = [sys.executable, "-c", _IMPORT, module, json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"the import takes more than {IMPORT_S:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"Python ended with status {done.returncode}"])[-1]
