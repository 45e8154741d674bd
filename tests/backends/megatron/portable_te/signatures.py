"""Record the interface of Transformer Engine as far as the portable package offers it, in ``signatures.json``.

``python -m tests.backends.megatron.portable_te.signatures FOLDER...`` reads one unpacked wheel of Transformer Engine
from each folder (``pip download --no-deps transformer-engine==2.8.0``; the wheel is pure Python). The source is parsed
and never imported. The record has names, order, kinds and literal defaults of parameters, and names of attributes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import sys
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anytron_megatron import portable_te

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RECORD = Path(__file__).with_name("signatures.json")


def offered() -> dict[str, tuple[Any, list[str]]]:
    """Return the public classes and functions of the portable package, each with the modules that have it."""
    names: dict[str, tuple[Any, list[str]]] = {}
    for found in pkgutil.walk_packages(portable_te.__path__, prefix=f"{portable_te.__name__}."):
        for name, value in vars(importlib.import_module(found.name)).items():
            own = getattr(value, "__module__", "").startswith(portable_te.__name__)
            if own and not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
                names.setdefault(name, (value, []))[1].append(found.name.removeprefix(f"{portable_te.__name__}."))
    return names


def keys(name: str, offer: Any) -> list[tuple[str, str]]:
    """Return the methods of an offer that are compared: of each the name in the record, and its own name."""
    if not inspect.isclass(offer):
        return [(name, "__init__")]
    own = [vars(owner).items() for owner in offer.__mro__ if owner.__module__.startswith(portable_te.__name__)]
    found = {method for items in own for method, value in items if inspect.isroutine(value)}
    return [(f"{name}.{method}", method) for method in found if method == "__init__" or not method.startswith("_")]


def read(text: str) -> Signature:
    """Read a signature from the record."""
    (function,) = ast.parse(f"def function{text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return _signature(function)


def merged(functions: Iterable[Signature]) -> Signature:
    """Return the signature of a method that passes its ``**kwargs`` on to the same method of its base, and so on."""
    found: dict[str, Parameter] = {}
    for signature in functions:
        others = [one for one in signature.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        named = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in others if one.kind is not Parameter.VAR_POSITIONAL]
        found |= {one.name: one for one in (named if found else others) if one.name not in found}
        rest = [one for one in signature.parameters.values() if one.kind is Parameter.VAR_KEYWORD]
        if not rest:
            break
    return Signature([*sorted(found.values(), key=lambda one: one.kind), *rest])


def _signature(function: ast.FunctionDef) -> Signature:
    """Return the signature without ``self`` and annotations; a default that is no literal becomes ``...``."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    absent = [None] * (len(positional) - len(arguments.defaults))
    found = [
        Parameter(one.arg, kind, default=_default(default))
        for kind, some, defaults in (
            (Parameter.POSITIONAL_OR_KEYWORD, positional, [*absent, *arguments.defaults]),
            (Parameter.KEYWORD_ONLY, arguments.kwonlyargs, arguments.kw_defaults),
        )
        for one, default in zip(some, defaults, strict=True)
        if one.arg not in ("self", "cls")
    ]
    if arguments.vararg is not None:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    if arguments.kwarg is not None:
        found += [*_popped(function, arguments.kwarg.arg), Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD)]
    return Signature(sorted(found, key=lambda one: one.kind))


def _popped(function: ast.FunctionDef, kwargs: str) -> Iterator[Parameter]:
    """Yield the parameters that a function takes out of its ``**kwargs``."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{kwargs}.pop":
            name, default = node.args
            yield Parameter(ast.literal_eval(name), Parameter.KEYWORD_ONLY, default=_default(default))


def _default(default: ast.expr | None) -> Any:
    if default is None:
        return Parameter.empty
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ...


class _Found(NamedTuple):
    """A definition, and the module that has it."""

    module: str
    node: ast.ClassDef | ast.FunctionDef


class Source:
    """The source of one version of Transformer Engine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (distribution,) = importlib.metadata.distributions(path=[str(folder)])
        self.version = distribution.version
        self._tree = cache(self._parse)

    def record(self) -> dict[str, dict[str, str]]:
        """Return the signatures and attributes of all names that this version and the portable package have."""
        signatures, attributes = {}, {}
        for name, (offer, places) in offered().items():
            all_found = [self._find(f"transformer_engine.{place}", name) for place in places]
            found = next(filter(None, all_found), None)
            if found is None:
                continue
            if isinstance(found.node, ast.FunctionDef):
                signatures[name] = str(_signature(found.node))
                continue
            lineage = self._lineage(found)
            for key, method in keys(name, offer):
                if own := _methods(lineage, method):
                    signatures[key] = str(merged(map(_signature, own)))
            if assigned := {one for own in _methods(lineage, "__init__") for one in _assigned(own)}:
                attributes[name] = " ".join(sorted(assigned))
        return {"attributes": attributes, "signatures": signatures}

    def _file(self, module: str) -> Path:
        path = self._folder.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _parse(self, module: str) -> ast.Module:
        path = self._file(module)
        return ast.parse(path.read_text() if path.is_file() else "")

    def _find(self, module: str, name: str) -> _Found | None:
        """Find a class or a function; for an instance, the method ``__call__`` of its class."""
        for node in self._tree(module).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return _Found(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) in (name, "*"):
                        real = name if alias.name == "*" else alias.name
                        if found := self._find(self._imported(module, node), real):
                            return found
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == name
                and isinstance(node.value, ast.Call)
            ):
                of = self._find(module, ast.unparse(node.value.func))
                return None if of is None else _Found(of.module, _methods(self._lineage(of), "__call__")[0])
        return None

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module from which a statement imports."""
        if not node.level:
            return node.module or ""
        parts = module.split(".") + ["__init__"] * (self._file(module).name == "__init__.py")
        return ".".join([*parts[: -node.level], *filter(None, [node.module])])

    def _lineage(self, found: _Found) -> list[ast.ClassDef]:
        """Return a class and its bases within Transformer Engine."""
        assert isinstance(found.node, ast.ClassDef)
        bases = [self._find(found.module, ast.unparse(base)) for base in found.node.bases]
        return [found.node, *(one for base in bases if base is not None for one in self._lineage(base))]


def _methods(lineage: list[ast.ClassDef], name: str) -> list[ast.FunctionDef]:
    return [one for owner in lineage for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == name]


def _assigned(constructor: ast.FunctionDef) -> Iterator[str]:
    """Yield the public attributes of ``self`` to which a constructor assigns."""
    for node in ast.walk(constructor):
        own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        if own and not node.attr.startswith("_"):
            yield node.attr


def main(folders: list[str]) -> None:
    """Write the record of the versions in these folders."""
    sources = [Source(Path(folder)) for folder in folders]
    record = {source.version: source.record() for source in sources}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
