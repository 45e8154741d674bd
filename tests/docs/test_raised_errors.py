"""A public function that raises an error of Anytron in its own body names the error's class, or a base of it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.docs.error_page import classes
from tests.house import PACKAGES, ROOT, modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
COMMANDS = "_commands.py"
"""The docstrings of commands are their help."""


def unnamed(source: str) -> Iterator[tuple[str, str]]:
    """Public functions and methods of a module, each with an error that it raises and does not name."""
    known, tree = classes(), ast.parse(source)
    for holder in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        for function in holder.body:
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name.startswith("_"):
                continue
            said = ast.get_docstring(function) or ""
            for name in raised_by(function.body):
                bases = known[name].__mro__ if said and name in known else ()
                if bases and not any(base.__name__ in said for base in bases if base.__name__ in known):
                    yield function.name, name


def raised_by(body: Iterable[ast.AST]) -> Iterator[str]:
    """Names in the raise statements of a body, without those of functions and classes inside of it."""
    for node in body:
        if isinstance(node, INNER):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from (one.id for one in ast.walk(node.exc) if isinstance(one, ast.Name))
        yield from raised_by(ast.iter_child_nodes(node))


def test_functions_name_the_errors_that_they_raise():
    found, read = [], 0
    for package in PACKAGES:
        for path in modules(package).values():
            if not path.name.endswith(COMMANDS):
                read += 1
                name = path.relative_to(ROOT)
                found += [f"{name}: {function} raises {error}" for function, error in unnamed(path.read_text("utf-8"))]
    assert found == []
    assert read > 400


RAISES = "def load(path):\n    {}\n    if not path:\n        raise ProcessLost('gone', fix='look')\n"


def test_an_error_that_is_not_named_is_noticed():
    assert list(unnamed(RAISES.format("'Load a file.'"))) == [("load", "ProcessLost")]
    assert list(unnamed(RAISES.format("'Load. Raises: ConfigError: There is none.'"))) == [("load", "ProcessLost")]
    method = "class Loader:\n" + "".join(f"    {line}\n" for line in RAISES.format("'Load a file.'").splitlines())
    assert list(unnamed(method)) == [("load", "ProcessLost")]


@pytest.mark.parametrize(
    "source",
    [
        RAISES.format("'Load. Raises: ProcessLost: It is gone.'"),
        RAISES.format("'Load. Raises: WorkerError: It is gone.'"),
        RAISES.format("pass"),
        RAISES.format("'Load a file.'").replace("load", "_load"),
        RAISES.format("'Load a file.'").replace("ProcessLost", "ValueError"),
        "def load():\n    'Make a loader.'\n    def inner():\n        raise ProcessLost('gone')\n    return inner",
    ],
)
def test_others_are_let_through(source):
    assert list(unnamed(source)) == []
