"""Write ``docs/reference/errors.md`` from the classes of errors, and from every place in the sources that raises one.

Run ``python -m tests.docs.error_page docs/reference/errors.md`` after a change; a test compares.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base import errors
from anytron.base.errors import AnytronError
from tests.house import PACKAGES, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADING = """# Errors

<!-- Generated from core/anytron/base/errors.py and the places that raise errors by
`python -m tests.docs.error_page docs/reference/errors.md`. -->

What Anytron refuses or cannot do is an error of four parts: what failed, where, why, and the command or setting that
cures it. The command line prints them without a traceback and ends with status 1; anything else that reaches it is our
bug, and keeps its traceback. Below, an ellipsis stands for what an error fills in.
[Troubleshooting](../how-to/troubleshooting.md) says more about the frequent ones.

All classes inherit from `AnytronError`, whose instances have the attributes `what`, `where`, `why` and `fix`. Plugins
raise those that `anytron` [offers](api.md#anytron).
"""
FAULTS = """## What is wrong with a function of yours

Whatever the configuration names by `file.py:name` or `module:name` (`anytron.base.functions`): a reward, an
environment, an advantage, a loss, a source of prompts, a tokenizer's or processor's function, a sink of metrics. Found
before the start it is a `ConfigError`; later a `DataError`, a sample's failure, or of a sink a warning. Fix says what
the arguments are.
"""
MISTAKES = """## Mistakes of a configuration

Found before anything is started, and all at once. One alone is printed as "The configuration has a mistake.", with the
key as where, the rest as why and fix; several are listed. Some are warnings, which do not stop the run.
"""
_ANY = "\u2026"


@dataclass(frozen=True, order=True)
class Raised:
    """One way in which an error is raised.

    Attributes:
        name: Class of the error, or ``Diagnostic``.
        what: Its headline, or a diagnostic's key.
        why, fix: Those; empty where none is given.
    """

    name: str
    what: str
    why: str
    fix: str


def classes() -> dict[str, type[AnytronError]]:
    """The classes by name, as they stand in the file."""
    return {name: one for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, AnytronError)}


@functools.cache
def raised() -> tuple[Raised, ...]:
    """Every error and diagnostic that the sources make with a text of their own, sorted."""
    known = {*classes(), "Diagnostic", "Fault"}
    found = set()
    for package in PACKAGES:
        for path in modules(package).values():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                    found.update(_raised(node, node.func.id))
    return tuple(sorted(found))


def _raised(call: ast.Call, name: str) -> Iterator[Raised]:
    given = {one.arg: one.value for one in call.keywords}
    if name == "Fault":
        given |= dict(zip(("what", "why", "fix"), call.args, strict=False))
    if name == "Diagnostic":
        names = ("severity", "key", "message", "fix")
        given |= dict(zip(names, call.args, strict=False))
        key, message = (texts(given[part])[0] for part in ("key", "message"))
        if _says_something(message):
            yield Raised(name, key, message, _text(given.get("fix")))
        return
    headline = call.args[0] if call.args else given.get("what")
    for what in texts(headline) if headline is not None else ():
        if _says_something(what):
            yield Raised(name, what, _text(given.get("why")), _text(given.get("fix")))


def _text(node: ast.expr | None) -> str:
    return "" if node is None else " / ".join(dict.fromkeys(texts(node)))


def texts(node: ast.expr) -> list[str]:
    """What an expression may say: its letters, and an ellipsis for what is known only when it happens."""
    return [" ".join(text.split()) for text in _pieces(node)]


def _pieces(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_pieces(part)[0] if isinstance(part, ast.Constant) else _ANY for part in parts)]
        case ast.IfExp(body=body, orelse=other):
            return [*_pieces(body), *_pieces(other)]
        case ast.BoolOp(values=parts):
            return [text for part in parts for text in _pieces(part)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [before + after for before in _pieces(left) for after in _pieces(right)]
        case _:
            return [_ANY]


def _says_something(text: str) -> bool:
    return any(letter.isalpha() for letter in text)


def render() -> str:
    """The whole page, as Markdown."""
    found = raised()
    lines = [HEADING]
    for name, one in classes().items():
        rows = [row for row in found if row.name == name]
        parent = one.__bases__[0].__name__
        kind = "" if one is AnytronError else f"A kind of `{parent}`.\n\n"
        lines.append(f"## {name}\n\n{kind}{_paragraphs(one)}\n")
        if rows:
            lines += ["| what | why | fix |", "|---|---|---|"]
            lines += [f"| {_cell(row.what)} | {_cell(row.why)} | {_cell(row.fix)} |" for row in rows]
            lines.append("")
    lines += [FAULTS, "| what | why | fix |", "|---|---|---|"]
    lines += [f"| {_cell(row.what)} | {_cell(row.why)} | {_cell(row.fix)} |" for row in found if row.name == "Fault"]
    lines += ["", MISTAKES, "| key | why | fix |", "|---|---|---|"]
    lines += [
        f"| {f'`{row.what}`' if _says_something(row.what) else ''} | {_cell(row.why)} | {_cell(row.fix)} |"
        for row in found
        if row.name == "Diagnostic"
    ]
    return "\n".join(lines).rstrip() + "\n"


def _paragraphs(one: type[AnytronError]) -> str:
    text = (inspect.getdoc(one) or "").partition("\nArgs:")[0].rstrip()
    return text.replace("``", "`")


def _cell(text: str) -> str:
    if text == _ANY:
        return ""
    for sign, escaped in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("`", "\\`"), ("_", "\\_")):
        text = text.replace(sign, escaped)
    return text


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
