"""Find where an object is referenced, and replace it in modules that imported it by name (``from m import f``)."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class Rebinding:
    """A global name of a module that was bound to another object."""

    module: ModuleType
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"

    def undo(self) -> None:
        """Bind the name to its earlier object again, unless other code has rebound it since."""
        if vars(self.module).get(self.name) is self.after:
            vars(self.module)[self.name] = self.before


def can_be_found(value: Any) -> bool:
    """Whether holders of ``value`` can be found by identity: true of functions and classes, not of plain values."""
    return isinstance(value, FunctionType | BuiltinFunctionType | type) or callable(value)


def rebind(
    replaced: Iterable[tuple[Any, Any]], concerns: Callable[[str], bool] = lambda _module: True
) -> list[Rebinding]:
    """Replace objects wherever a loaded module holds them as a global name.

    Objects in default arguments, closures, class attributes and containers are not found.

    Args:
        replaced: Pairs (old object, new object); pairs whose old object is a plain value are ignored.
        concerns: Function that tells, by a module's name, whether the module may be changed.

    Returns:
        The changes, in the order of ``sys.modules``.
    """
    by_identity = {id(old): (old, new) for old, new in replaced if old is not new and can_be_found(old)}
    changed: list[Rebinding] = []
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not concerns(module_name):
            continue
        # The dictionary itself: getattr would load lazy modules (transformers has hundreds).
        for name, value in list(vars(module).items()):
            pair = by_identity.get(id(value))
            if pair is not None:
                vars(module)[name] = pair[1]
                changed.append(Rebinding(module, name, *pair))
    return changed


def holders(package: str, limit: int = 5) -> list[str]:
    """Name loaded modules outside of ``package`` that hold the package or an object defined in it."""
    prefix = package + "."

    def belongs(name: object) -> bool:
        return isinstance(name, str) and (name == package or name.startswith(prefix))

    found: list[str] = []
    for module_name, module in list(sys.modules.items()):
        if len(found) == limit:
            break
        if not isinstance(module, ModuleType) or belongs(module_name):
            continue
        for value in list(vars(module).values()):
            # The type, not isinstance: that reads value.__class__, which makes some lazy objects import or warn.
            kind = type(value)
            if issubclass(kind, ModuleType):
                origin: object = value.__name__
            elif issubclass(kind, FunctionType | type):
                origin = value.__module__
            else:
                continue
            # A namespace package's own submodule entry (megatron -> megatron.core) imports nothing.
            if belongs(origin) and not package.startswith(module_name + "."):
                found.append(module_name)
                break
    return found


def leftovers(original: Any, but_not: Any) -> list[str]:
    """Describe the default arguments, class attributes and module-level containers that hold ``original``.

    Closures are left out: a decorator, or a wrapper that replaces ``original``, holds it on purpose.

    Args:
        original: A function or class that was replaced.
        but_not: The replacement, which may hold ``original``.

    Returns:
        One phrase for each holder, sorted.
    """
    found: set[str] = set()
    for holder in gc.get_referrers(original):
        if isinstance(holder, tuple | dict | list | set):
            found |= _owners(holder, original, but_not)
    return sorted(found)


def _owners(holder: Any, original: Any, but_not: Any) -> set[str]:
    found = set()
    for owner in gc.get_referrers(holder):
        if owner is but_not:
            continue
        if isinstance(owner, FunctionType) and holder in (owner.__defaults__, owner.__kwdefaults__):
            found.add(f"a default argument of {owner.__module__}.{owner.__qualname__}")
        elif isinstance(owner, type) and isinstance(holder, dict):
            names = [name for name, value in list(vars(owner).items()) if _unwrapped(value) is original]
            # The class that defines the original holds it by right: methods are no leftovers of themselves.
            found |= {f"{owner.__module__}.{owner.__qualname__}.{name}" for name in names}
        elif isinstance(owner, dict) and not isinstance(holder, tuple):
            found |= _module_level(owner, holder)
    return found


def _module_level(namespace: dict[Any, Any], holder: Any) -> set[str]:
    module = sys.modules.get(str(namespace.get("__name__")))
    if not isinstance(module, ModuleType) or vars(module) is not namespace:
        return set()
    return {
        f"{module.__name__}.{name}"
        for name, value in list(namespace.items())
        if value is holder and not name.startswith("__")
    }


def _unwrapped(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value
