"""Find holders of an object that are not module-level names: rebinding does not reach them."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, ModuleType
from typing import Any


def leftovers(original: Any, but_not: Any) -> list[str]:
    """Describe the default arguments, class attributes and module-level containers that hold ``original``.

    It leaves closures out: decorators hold what they decorate on purpose, and so do the wrappers that replace it.

    Args:
        original: A function or class that was replaced.
        but_not: Its replacement, which may hold it.

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
