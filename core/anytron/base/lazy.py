"""Import the names of a public module when they are first asked for: importing the module itself imports nothing.

A public module imports its names for type checkers only. Those imports also say in which module each name is defined,
so that no second list is needed.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path


def find(module: str, name: str) -> object:
    """Import a public name from the module that defines it, and store it in the public module.

    Args:
        module: Name of the public module, which has been imported.
        name: The attribute that was asked for.

    Raises:
        AttributeError: ``name`` is not in the module's ``__all__``.
    """
    public = sys.modules[module]
    if name not in public.__all__:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, there = homes(Path(str(public.__file__)))[name]
    found: object = getattr(importlib.import_module(home), there)
    setattr(public, name, found)
    return found


def homes(path: Path) -> dict[str, tuple[str, str]]:
    """Return, for each name that a source file imports, the module that defines it and the name that it has there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
