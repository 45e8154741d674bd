"""Find out whether the target of a patch exists, without an import: ask a loaded module, or read its source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from anytron.device.patches.patch import Patch

_DYNAMIC = {"globals", "vars", "locals", "setattr", "exec", "__getattr__"}
"""Names by which the source of a module or class may define more than it shows."""


def missing_target(patch: Patch) -> str:
    """Tell which part of a patch's target does not exist in this environment.

    It asks a module that is imported already, and reads the source of any other.

    Returns:
        One phrase; empty if the target exists, if only an import could tell (extension modules, star imports,
        inherited methods), or if the patch has an ``install`` function and needs no original.
    """
    if not patch.replacement:
        return ""
    path = patch.attribute.split(".")
    loaded = sys.modules.get(patch.module)
    if loaded is not None:
        return _missing_in_object(loaded, patch.module, path)
    spec = _find_spec(patch.module)
    if spec is None:
        return f"there is no module {patch.module}"
    if spec.origin is None or not spec.origin.endswith(".py") or _find_spec(f"{patch.module}.{path[0]}"):
        return ""
    return _missing_in_source(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), patch.module, path)


def _missing_in_object(value: Any, name: str, path: Sequence[str]) -> str:
    for part in path:
        if not hasattr(value, part):
            return f"{name} has no attribute {part}"
        value, name = getattr(value, part), f"{name}.{part}"
    return ""


def _missing_in_source(scope: ast.AST, name: str, path: Sequence[str]) -> str:
    """Look for a name in a scope and, if it is a class without bases, for the next name in that class."""
    nodes = list(ast.walk(scope))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == path[0]]
    names = set().union(*map(_names, nodes))
    if path[0] not in names and not names & {"*", *_DYNAMIC}:
        return f"{name} has no attribute {path[0]}"
    if len(path) > 1 and len(classes) == 1 and [ast.unparse(base) for base in classes[0].bases] in ([], ["object"]):
        return _missing_in_source(classes[0], f"{name}.{path[0]}", path[1:])
    return ""


def _names(node: ast.AST) -> set[str]:
    """Return the names that a piece of source defines or uses."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    return {node.id} if isinstance(node, ast.Name) else set()


def _find_spec(module: str) -> ModuleSpec | None:
    """Find a module as the import system would, without importing the packages that it lies in."""
    path: Sequence[str] | None = None
    spec = None
    parts = module.split(".")
    for number in range(len(parts)):
        if number and path is None:
            return None
        name = ".".join(parts[: number + 1])
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec
