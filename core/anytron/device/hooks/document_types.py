"""Describe the types that hooks name, and the fused kernels, for ``docs/reference/hooks.md``.

All of it comes from the sources: which types there are from the hooks' annotations and from those of the types' own
fields, the meaning of each field from docstrings.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from anytron.kernels.contract import KernelName, KernelSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

ELSEWHERE = {"RunConfig": "config.md", "Ledger": "../explanation/patches.md"}
"""Types that another page describes."""
MORE = (("anytron.device.patches", "Installed"), ("anytron.device.runtime", "TorchDeviceRuntime"))
"""Types that no annotation names, and a plugin needs: the result of a patch, and the shortest way to a runtime."""
_OURS = "anytron"


class Named(NamedTuple):
    """A type: its name, and the module that people import it from."""

    name: str
    module: str

    @property
    def value(self) -> Any:
        """The class, or what an alias stands for."""
        return getattr(importlib.import_module(self.module), self.name)


def types_in(annotations: Iterable[str], module: ModuleType) -> list[Named]:
    """Find the types of ours that annotations name, in their order.

    Args:
        annotations: As they are written.
        module: Where they are written, with all that it imports, for type checkers as well.
    """
    places = _places(module)
    names = [name for text in annotations for name in re.findall(r"\b[A-Z]\w+", text)]
    return [_exported(Named(name, places[name])) for name in dict.fromkeys(names) if name in places]


def reachable(found: Iterable[Named]) -> list[Named]:
    """Add the types that fields, and methods that a plugin implements, name in their turn; sorted by name."""
    known: dict[str, Named] = {}
    waiting = [Named(name, module) for module, name in MORE]
    waiting += [one for one in found if one.name not in ELSEWHERE]
    while waiting:
        one = waiting.pop()
        if one.name in known:
            continue
        known[one.name] = one
        defined = importlib.import_module(getattr(one.value, "__module__", one.module))
        further = types_in(_annotations(one), defined if inspect.isclass(one.value) else _home(one))
        waiting += [other for other in further if other.name not in ELSEWHERE]
    return [known[name] for name in sorted(known)]


def describe_type(one: Named) -> str:
    """Give the section of a type, as Markdown."""
    lines = [f"### {one.name}", "", "```python", f"from {one.module} import {one.name}", "```", ""]
    value = one.value
    if not inspect.isclass(value):
        return "\n".join([*lines, *_describe_alias(one)])
    text, parts = _split(inspect.getdoc(value) or "")
    lines += [text, ""]
    if dataclasses.is_dataclass(value):
        lines += _fields(value, parts.get("Attributes", {}))
    elif issubclass(value, Enum):
        meanings = _attribute_docstrings(value)
        lines += [f"- `{member.name}` = `{member.value}`{_after(meanings.get(member.name))}" for member in value] + [""]
    else:
        meanings = parts.get("Attributes", {}) | _attribute_docstrings(value)
        lines += [f"- `{name}`: {meaning}" for name, meaning in meanings.items()] + [""] * bool(meanings)
        lines += _listed("Args", parts) + _listed("Returns", parts)
    return "\n".join([*lines, *_methods(value)])


def describe_kernel(name: KernelName) -> str:
    """Give the section of a fused kernel: how it is called."""
    from anytron.kernels.fused import default_kernel

    function = default_kernel(name, KernelSpec("cpu"))
    text, parts = _split(inspect.getdoc(function) or "")
    signature = f"{name.value}{_signature(function)}"
    found = [f"### {name.value}", "", "```python", signature, "```", "", text, ""]
    return "\n".join([*found, *_listed("Args", parts), *_listed("Returns", parts)])


# ---- where types are ----------------------------------------------------------------------------------


def _places(module: ModuleType) -> dict[str, str]:
    """The names of ours that a module defines or imports, and the modules that they come from."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == _OURS:
            found |= {alias.name: node.module or "" for alias in node.names}
    own = vars(module)
    return found | {name: module.__name__ for name in _definitions(module) if name in own}


def _definitions(module: ModuleType) -> list[str]:
    """Classes and aliases that a module defines: whatever has a capital and small letters."""
    names = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.append(node.targets[0].id)
    return [name for name in names if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name)]


def _exported(one: Named) -> Named:
    """Name the package instead of the file where it exports the type."""
    package = one.module.rpartition(".")[0]
    exports = getattr(importlib.import_module(package), "__all__", ()) if "." in package else ()
    return Named(one.name, package) if one.name in exports else one


def _home(one: Named) -> ModuleType:
    return importlib.import_module(one.module)


def _annotations(one: Named) -> list[str]:
    value = one.value
    if not inspect.isclass(value):
        return [_source_of_alias(one)]
    found = [str(annotation) for annotation in vars(value).get("__annotations__", {}).values()]
    if dataclasses.is_dataclass(value):
        return found
    return found + [
        str(annotation) for _, method in _functions(value) for annotation in method.__annotations__.values()
    ]


# ---- what they are ------------------------------------------------------------------------------------


def _fields(value: Any, meanings: dict[str, str]) -> list[str]:
    lines = ["| field | type | |", "|---|---|---|"]
    for field in dataclasses.fields(value):
        default = "" if field.default is dataclasses.MISSING else f" = {_plain(field.default)}"
        default = default if field.default_factory is dataclasses.MISSING else " = {}"
        kind = f"`{field.type}{default}`".replace("|", r"\|")
        lines.append(f"| `{field.name}` | {kind} | {meanings.get(field.name, '').replace('|', chr(92) + '|')} |")
    return [*lines, ""]


def _plain(default: object) -> str:
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


def _describe_alias(one: Named) -> list[str]:
    source = _source_of_alias(one)
    return ["```python", f"{one.name} = {source}", "```", "", _markdown(_docstrings(_home(one)).get(one.name, "")), ""]


def _source_of_alias(one: Named) -> str:
    source = inspect.getsource(_home(one))
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == one.name:
            return ast.get_source_segment(source, node.value) or ""
    return ""


def _attribute_docstrings(value: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(value)).body
    return dict(_documented(definition.body)) if isinstance(definition, ast.ClassDef) else {}


def _docstrings(module: ModuleType) -> dict[str, str]:
    return dict(_documented(ast.parse(inspect.getsource(module)).body))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield assigned names that a string follows, with that string."""
    for node, after in pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield target.id, _joined(_markdown(inspect.cleandoc(str(after.value.value))))


# ---- docstrings ---------------------------------------------------------------------------------------


def _split(docstring: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Split a docstring into its text and its sections, each with entries by name; a text without a name has ''."""
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
