"""Write ``docs/reference/api.md`` from the public modules.

Run ``python -m anytron.public.document docs/reference/api.md`` after a change of public names; a test fails if the page
is not up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anytron.base.lazy import homes
from anytron.device.platform import API_VERSION
from anytron.device.stack import open_device_stack
from anytron.public import MODULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


class Named(NamedTuple):
    """A public name and the public module that exports it."""

    name: str
    module: str

    @property
    def value(self) -> Any:
        """The object that has the name: a class, a function, or what an alias stands for."""
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def home(self) -> ModuleType:
        """The module that defines the name, found by following imports."""
        module, name = importlib.import_module(self.module), self.name
        while place := homes(Path(str(module.__file__))).get(name):
            module, name = importlib.import_module(place[0]), place[1]
        return module


def describe(one: Named) -> str:
    """Return the page's section about a public name, as Markdown."""
    value, called = one.value, [f"from {one.module} import {one.name}"]
    if inspect.isfunction(value):
        called += ["", f"{one.name}{_signature(value)}"]
    elif not inspect.isclass(value):
        called += ["", f"{one.name} = {source}"] if (source := _source_of(one)) else []
    heading = f"`{one.name}`" if one.name.startswith("_") else one.name  # no Markdown
    lines = [f"### {heading}", "", "```python", *called, "```", ""]
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return "\n".join([*lines, _markdown(_docstrings(one.home).get(one.name, "")), ""])
    text, parts = _split(inspect.getdoc(value) or "")
    lines += [text, ""]
    if inspect.isfunction(value):
        return "\n".join([*lines, *_listed("Args", parts), *_listed("Returns", parts), *_listed("Raises", parts)])
    if hasattr(value, "model_fields"):
        return "\n".join([*lines, *["Its keys are in [the configuration](config.md).", ""] * bool(value.model_fields)])
    return "\n".join([*lines, *_members(value, parts), *_methods(value)])


def _members(value: Any, parts: dict[str, dict[str, str]]) -> list[str]:
    if dataclasses.is_dataclass(value):
        return _fields(value, parts.get("Attributes", {}))
    if issubclass(value, Enum):
        meanings = _attribute_docstrings(value)
        return [f"- `{member.name}` = `{member.value}`{_after(meanings.get(member.name))}" for member in value] + [""]
    meanings = parts.get("Attributes", {}) | _attribute_docstrings(value)
    attributes = [f"- `{name}`: {meaning}" for name, meaning in meanings.items()] + [""] * bool(meanings)
    return attributes + _listed("Args", parts) + _listed("Returns", parts)


def _fields(value: Any, meanings: dict[str, str]) -> list[str]:
    lines = ["| field | type | |", "|---|---|---|"]
    for field in dataclasses.fields(value):
        default = "" if field.default is dataclasses.MISSING else f" = {_plain(field.default)}"
        default = default if field.default_factory is dataclasses.MISSING else " = {}"
        kind = f"`{field.type}{default}`".replace("|", r"\|")
        lines.append(f"| `{field.name}` | {kind} | {meanings.get(field.name, '').replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def _plain(default: object) -> str:
    if inspect.isfunction(default):
        return default.__name__
    return f"{type(default).__name__}.{default.name}" if isinstance(default, Enum) else repr(default)


def _methods(value: type) -> list[str]:
    """The public methods and properties of a class, each with the first paragraph of its docstring."""
    lines = []
    for name, method in _functions(value):
        text = _joined(_markdown((inspect.getdoc(method) or "").partition("\n\n")[0]))
        own = isinstance(vars(value)[name], property)
        called = f"{name}: {method.__annotations__['return']}" if own else f"{name}{_signature(method)}"
        needed = " A subclass must define it." if getattr(method, "__isabstractmethod__", False) else ""
        lines.append(f"- `{called}`: {text}{needed}")
    return lines + [""] * bool(lines)


def _functions(value: type) -> list[tuple[str, Callable[..., Any]]]:
    """The functions that a class itself defines, static methods and properties included."""
    if issubclass(value, Enum):
        return []
    found = [
        (name, getattr(member, "fget", None) or getattr(member, "__func__", member))
        for name, member in vars(value).items()
        if name == "__call__" or not name.startswith("_")
    ]
    return [(name, member) for name, member in found if inspect.isfunction(member)]


def _signature(function: Callable[..., Any]) -> str:
    """Parameters and result as they are written, without ``self``."""
    signature = inspect.signature(function)
    texts: list[str] = []
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if one.default is one.empty else f" = {_plain(one.default)}"
        texts.append(f"{one.name}: {one.annotation}{default}")
    return f"({', '.join(texts)}) -> {signature.return_annotation}"


def _source_of(one: Named) -> str:
    """The source text of a constant's or alias's value; empty if a call computes the value."""
    source = inspect.getsource(one.home)
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == one.name:
            return "" if isinstance(node.value, ast.Call) else ast.get_source_segment(source, node.value) or ""
    return ""


def _attribute_docstrings(value: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(value)).body
    return dict(_documented(definition.body)) if isinstance(definition, ast.ClassDef) else {}


def _docstrings(module: ModuleType) -> dict[str, str]:
    return dict(_documented(ast.parse(inspect.getsource(module)).body))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield each assigned name that a docstring follows, with the docstring."""
    for node, after in pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield target.id, _joined(_markdown(inspect.cleandoc(str(after.value.value))))


# ---- docstrings ---------------------------------------------------------------------------------------


def _split(docstring: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Split a docstring into its text and its sections.

    The entries of ``Args`` and ``Attributes`` are by name; other sections have one entry, with the name "".
    """
    pieces = re.split(r"^(Attributes|Args|Returns|Raises|Yields):\n", docstring, flags=re.MULTILINE)
    parts: dict[str, dict[str, str]] = {}
    text = [pieces[0]]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        inside, _, rest = _until_outdented(body)
        parts[title] = dict(_entries(inspect.cleandoc("\n" + inside), named=title in ("Attributes", "Args")))
        text.append(rest)
    return _markdown("\n".join(filter(None, (piece.strip() for piece in text)))), parts


def _until_outdented(body: str) -> tuple[str, str, str]:
    lines = body.split("\n")
    end = next((index for index, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return "\n".join(lines[:end]), "", "\n".join(lines[end:])


def _entries(text: str, *, named: bool) -> Iterator[tuple[str, str]]:
    if not named:
        yield "", _joined(_markdown(text))
        return
    for entry in re.split(r"\n(?=\w)", text):
        name, _, meaning = entry.partition(":")
        yield name, _joined(_markdown(inspect.cleandoc(meaning)))


def _listed(title: str, parts: dict[str, dict[str, str]]) -> list[str]:
    entries = parts.get(title, {})
    if "" in entries:
        return [f"**{title}:** {entries['']}", ""]
    return [f"- `{name}`: {meaning}" for name, meaning in entries.items()] + [""] * bool(entries)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _after(meaning: str | None) -> str:
    return f": {meaning}" if meaning else ""


def _markdown(text: str) -> str:
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


HEADING = f"""# Public names

<!-- Generated from core/anytron/public and the modules that it lists, by
`python -m anytron.public.document docs/reference/api.md`. -->

What plugins and programs of others may import. Everything else is private and may change with every commit. Importing
one of these modules imports neither torch nor an engine: a name is imported from where it is defined when it is first
asked for. Classes with fields are frozen dataclasses: `dataclasses.replace` makes a changed copy.

## What a version promises

- **Names.** A public name, its arguments and its fields are deprecated for one minor release before they go: what 0.3
  deprecates works in 0.3, with a `DeprecationWarning` that names its successor, and may be gone in 0.4. A patch release
  removes and deprecates nothing.
- **Additions.** Every release may add names, optional arguments, fields with a default, members of enumerations, and
  hooks.
- **Platforms.** A platform says in `api_version` for which version of `Platform` and of the [hooks](hooks.md) it was
  written; this is version {API_VERSION}. The number grows when an existing platform would have to change. A platform of
  another version is refused by name before anything starts.
- **Processes of one run** have the same version of Anytron: a worker refuses a driver of another one.

## Modules

A platform needs `anytron`, and for its hooks `anytron.kernels` and `anytron.sequences`. A configuration names functions
and classes that need `anytron.tasks`. A program with its own trainer needs `anytron.train` and `anytron_megatron`. The
other modules are for plugins that bring an engine or a whole framework.
"""


def render() -> str:
    """The whole page, as Markdown."""
    contents = ["| module | for |", "|---|---|"]
    contents += [f"| [`{module}`](#{_anchor(module)}) | {purpose} |" for module, purpose in MODULES.items()]
    sections = [part for module, purpose in MODULES.items() for part in _section(module, purpose)]
    return _linked("\n".join([HEADING, *contents, "", *sections]).rstrip() + "\n")


def names(module: str) -> list[Named]:
    """Return the public names of a module."""
    return [Named(name, module) for name in importlib.import_module(module).__all__]


def _section(module: str, purpose: str) -> list[str]:
    found = names(module)
    listed = ", ".join(f"[`{one.name}`](#{one.name.lower()})" for one in found)
    return [f"## {module}", "", f"{purpose}: {listed}.", "", *map(describe, found)]


def _linked(page: str) -> str:
    """Replace references to public names (``anytron.module.Name``) in a page by links to the names' sections."""
    known = {one.name for module in MODULES for one in names(module)}

    def link(found: re.Match[str]) -> str:
        is_name = found[1] in known and found[0].strip("`") not in MODULES
        return f"[`{found[1]}`](#{found[1].lower()})" if is_name else found[0]

    return re.sub(r"`anytron\w*(?:\.\w+)+\.(\w+)`", link, page)


def _anchor(heading: str) -> str:
    return heading.replace(".", "").lower()


if __name__ == "__main__":
    with open_device_stack("cpu"):  # some names import Megatron, which without Triton is imported in the stack only
        PAGE = render()
    Path(sys.argv[1]).write_text(PAGE, encoding="utf-8")
