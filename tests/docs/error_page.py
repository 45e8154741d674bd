"""Write ``docs/reference/errors.md`` from the classes of errors, and from every place in the sources that raises one.

Run ``python -m tests.docs.error_page docs/reference/errors.md`` after a change; a test compares.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from anytron.base import errors
from anytron.base.errors import AnytronError
from tests.house import PACKAGES, modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

HEADING = """# Errors

<!-- Generated from core/anytron/base/errors.py and the places that raise errors by
`python -m tests.docs.error_page docs/reference/errors.md`. -->

Search this page for the first line of an error. Words in italics stand for what the error fills in. Each entry has the
other lines of the error, and the modules that raise it. [Troubleshooting](../how-to/troubleshooting.md) says more about
the frequent ones.

The command line prints an error without a traceback and ends with status 1. Anything else that reaches the command line
is a bug of Anytron, and keeps its traceback. All classes inherit from `AnytronError`, whose instances have the
attributes `what`, `where`, `why` and `fix`. Plugins raise those that `anytron` [offers](api.md#anytron).
"""
FAULTS = """## Functions and classes of yours

The configuration names them by `file.py:name` or `module:name` (`anytron.base.functions`): a reward, an environment, an
advantage, a loss, a source of prompts, a tokenizer's or processor's function, a sink of metrics. Before the start, such
an error is a `ConfigError`; later it is a `DataError`, the failure of a sample, or (of a sink) a warning.
"""
MISTAKES = """## Mistakes in a configuration

All of them are found before anything starts, and reported together. A single one is printed as "The configuration has a
mistake."; an entry here has its `why` as the first line. Some are warnings, which do not stop the run.
"""
Scope: TypeAlias = "dict[str, list[ast.expr]]"
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_OPEN, _CLOSE = "\u2039", "\u203a"
"""Around the name of what is known only when an error happens."""
_PLAIN = ("name", "value", "__name__", "text", "msg")
"""Attributes that say less than the object that has them."""
_WORDS = {"of": "place", "one": "name", "k": "name", "traced": "traceback"}
"""Names of the sources that say nothing on the page."""
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "\u00d7", ast.FloorDiv: "/"}
"""Of what is computed of values; not of /, which joins paths or changes a unit."""
_THROUGH = (
    "str",
    "repr",
    "sorted",
    "tuple",
    "list",
    "set",
    "map",
    "filter",
    "fromkeys",
    "min",
    "max",
    "next",
    "join",
)
"""Functions whose last argument says more than their name."""

_METHODS = ("capitalize", "get", "lower", "removesuffix", "resolve", "splitlines")
"""Methods whose object says more than their name."""


@dataclass(frozen=True)
class Raised:
    """One way in which an error is raised. Where an expression has several texts, each of them is an element.

    Attributes:
        name: Class of the error, or ``Diagnostic``.
        what: Its headline, or a diagnostic's message.
        where, why, fix: Its other parts; empty where none is given.
        module: The one that raises it.
    """

    name: str
    what: str
    where: tuple[str, ...]
    why: tuple[str, ...]
    fix: tuple[str, ...]
    module: str


def classes() -> dict[str, type[AnytronError]]:
    """The classes by name, as they stand in the file."""
    return {name: one for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, AnytronError)}


@functools.cache
def raised() -> tuple[Raised, ...]:
    """Every error and diagnostic that the sources make with a text of their own, sorted by what a reader sees."""
    known = {*classes(), "Diagnostic", "Fault"}
    found = set()
    for package in PACKAGES:
        for module, path in modules(package).items():
            found.update(raised_in(path.read_text(encoding="utf-8"), module, known))
    return tuple(sorted(found, key=lambda one: (one.name, _bare(one.what).casefold(), astuple(one))))


def raised_in(source: str, module: str, known: Iterable[str]) -> Iterator[Raised]:
    """The errors that a module makes by calling one of the known names."""
    for node, scope in _calls(ast.parse(source).body, {}):
        if isinstance(node.func, ast.Name) and node.func.id in known:
            yield from _raised(node, node.func.id, scope, module)


def _calls(body: Iterable[ast.stmt], scope: Scope) -> Iterator[tuple[ast.Call, Scope]]:
    """All calls, each with the texts that names stand for where it is made; ``scope`` becomes what holds afterwards."""
    for statement in body:
        blocks = [block for part in _BLOCKS for block in _statements(getattr(statement, part, []))]
        inside = {id(node) for block in blocks for one in block for node in ast.walk(one)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and id(node) not in inside:
                yield node, dict(scope)
        ends = []
        for block in blocks:
            ends.append(dict(scope))
            yield from _calls(block, ends[-1])
        if isinstance(statement, ast.If) and not statement.orelse:
            ends.append(dict(scope))
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                _assign(scope, name, value)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=False):
                    _assign(scope, ast.unparse(target), value)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While() | ast.Match():
                for name in {name for end in ends for name in end}:
                    given = [value for end in ends for value in end.get(name, ())]
                    scope[name] = list({id(value): value for value in given}.values())


def _statements(part: Iterable[ast.AST]) -> list[list[ast.stmt]]:
    """The blocks of statements in a part of a statement: itself, or those of its handlers and cases."""
    handlers = [one.body for one in part if isinstance(one, ast.ExceptHandler | ast.match_case)]
    plain = [one for one in part if isinstance(one, ast.stmt)]
    return [*handlers, plain] if plain else handlers


def _assign(scope: Scope, name: str, value: ast.expr) -> None:
    if isinstance(value, ast.Name) and value.id in scope:
        scope[name] = scope[value.id]
    elif _is_text(value):
        scope[name] = [value]
    else:
        scope.pop(name, None)


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            return True
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _is_text(left) or _is_text(right)
        case ast.IfExp(body=body, orelse=other):
            return _is_text(body) or _is_text(other)
        case _:
            return False


def _raised(call: ast.Call, name: str, scope: Scope, module: str) -> Iterator[Raised]:
    given = {one.arg: one.value for one in call.keywords}
    names = {"Fault": ("what", "why", "fix"), "Diagnostic": ("severity", "where", "what", "fix")}.get(name, ("what",))
    given |= dict(zip(names, call.args, strict=False))
    if name == "Diagnostic":
        given |= {part: given[own] for part, own in (("where", "key"), ("what", "message")) if own in given}

    headline = given.get("what")
    heads = scope.get(headline.id, [headline]) if isinstance(headline, ast.Name) else [headline]
    for number, head in enumerate(heads):
        others = dict(given)
        for part, value in given.items():
            values = scope.get(value.id, []) if isinstance(value, ast.Name) else []
            if len(values) == len(heads):  # each branch gave a headline and this
                others[part] = values[number]
        where, why, fix = (_said(others.get(part), scope) for part in ("where", "why", "fix"))
        for what in _said(head, scope):
            if any(letter.isalpha() for letter in _bare(what)):
                yield Raised(name, what, where, why, fix, module)


def _said(node: ast.expr | None, scope: Scope) -> tuple[str, ...]:
    return () if node is None else tuple(dict.fromkeys(filter(None, texts(node, scope))))


def texts(node: ast.expr, scope: Scope | None = None) -> list[str]:
    """What an expression may say. What is known only when it happens has a name between two signs.

    Args:
        node: The expression.
        scope: The texts that names in it may stand for.
    """
    return [" ".join(text.split()) for text in _pieces(node, scope or {})]


def _pieces(node: ast.expr, scope: Scope) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part, scope) for part in parts)]
        case ast.IfExp(body=body, orelse=other):
            return [*_pieces(body, scope), *_pieces(other, scope)]
        case ast.BoolOp(values=parts):
            return [text for part in parts for text in _pieces(part, scope)]
        case ast.BinOp(left=left, op=ast.Add(), right=right) if not (_is_number(left) or _is_number(right)):
            return [before + after for before in _pieces(left, scope) for after in _pieces(right, scope)]
        case ast.Name(id=name) if name in scope:
            outside = {other: values for other, values in scope.items() if other != name}
            return [text for value in scope[name] for text in _pieces(value, outside)]
        case ast.Call(func=ast.Name(id="did_you_mean")):
            return [f"did you mean {_OPEN}name{_CLOSE}?"]
        case ast.Call(func=ast.Attribute(attr="advised"), args=[inner]):
            return _pieces(inner, scope)
        case _:
            return [f"{_OPEN}{_name(node)}{_CLOSE}"]


def _part(part: ast.expr, scope: Scope) -> str:
    """A part of an f-string: text, or something that is filled in."""
    if isinstance(part, ast.FormattedValue):
        found = _pieces(part.value, scope)
        if isinstance(part.value, ast.BoolOp):  # {names or "nothing"} is read as *names*
            found = found[:1]
        return found[0] if len(found) == 1 else " or ".join(dict.fromkeys(filter(None, found)))
    return _pieces(part, scope)[0]


def _name(node: ast.expr) -> str:
    """A name for the value of an expression, as a reader would call it."""
    match node:
        case ast.Name(id=name):
            return _words(name)
        case ast.Attribute(value=value, attr=attribute) if attribute in _PLAIN and _name(value) != "self":
            return _name(value)
        case ast.Attribute(attr=attribute):
            return _words(attribute)
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            return _words(key) if key.isidentifier() else _name(value)
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
            return _name(value)
        case ast.Call():
            return _name_of_call(node)
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return _name(element)
        case ast.Constant(value=int() | float() as number):
            return str(number)
        case ast.BinOp(left=left, op=op, right=right):
            sign = _SIGNS.get(type(op))
            return f"{_name(left)} {sign} {_name(right)}" if sign else _name(left)
        case ast.BoolOp(values=[first, *_]) | ast.IfExp(body=first):
            return _name(first)
        case ast.JoinedStr(values=parts):
            return next((_name(part) for part in parts if isinstance(part, ast.FormattedValue)), "text")
        case _:
            return "value"


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _name_of_call(call: ast.Call) -> str:
    function = ast.unparse(call.func).rpartition(".")[2]
    if function == "len":
        return "number"
    if function in _THROUGH and call.args:
        return _name(call.args[-1])
    if function in _METHODS and isinstance(call.func, ast.Attribute):
        return _name(call.func.value)
    return _name(call.func)


def _words(name: str) -> str:
    return _WORDS.get(name.strip("_"), name.strip("_").replace("_", " ").lower())


def _bare(text: str) -> str:
    """A text without what is filled in."""
    return re.sub(f"{_OPEN}.*?{_CLOSE}", "", text)


def render() -> str:
    """The whole page, as Markdown."""
    found = {name: list(rows) for name, rows in groupby(raised(), key=lambda one: one.name)}
    lines = [HEADING]
    for name, one in classes().items():
        parent = one.__bases__[0].__name__
        kind = "" if one is AnytronError else f"A kind of `{parent}`.\n\n"
        lines += [f"## {name}\n\n{kind}{_paragraphs(one)}\n", *_entries(found.get(name, ()))]
    lines += [FAULTS, *_entries(found["Fault"]), MISTAKES, *_entries(found["Diagnostic"])]
    return "\n".join(lines).rstrip() + "\n"


def _entries(rows: Sequence[Raised]) -> Iterator[str]:
    """Each error once, with all the modules that raise it."""
    places: dict[Raised, list[str]] = {}
    for row in rows:
        places.setdefault(replace(row, module=""), []).append(row.module)
    for row, found in places.items():
        yield f"### {_shown(row.what)}\n"
        for part in ("where", "why", "fix"):
            said = [text for text in getattr(row, part) if text != f"{_OPEN}{part}{_CLOSE}"]
            if said:
                yield f"- {part}: {' *or* '.join(map(_shown, said))}"
        yield f"- raised in {', '.join(f'`{module}`' for module in found)}\n"


def _paragraphs(one: type[AnytronError]) -> str:
    text = (inspect.getdoc(one) or "").partition("\nArgs:")[0].rstrip()
    return text.replace("``", "`")


def _shown(text: str) -> str:
    for sign in "\\`*_<[":
        text = text.replace(sign, f"\\{sign}")
    return text.replace(_OPEN, "*").replace(_CLOSE, "*")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
