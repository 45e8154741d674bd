"""Find where an object is referenced, and replace it in modules that imported it by name (``from m import f``)."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from anytron.base.garbage import no_exemptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence


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
    """Name at most ``limit`` loaded modules outside of ``package`` that hold the package or an object defined in it."""
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


def leftovers(replaced: Sequence[tuple[Any, Any]]) -> list[list[str]]:
    """Describe the default arguments, class attributes and module-level containers that hold replaced objects.

    The containers are dictionaries, lists and sets. Closures are left out: a decorator, or a wrapper that replaces an
    object, holds it on purpose. The search looks twice at every object of the process, except those that
    other code has exempted with ``gc.freeze``; one search for several objects takes much less time than one for each.

    Args:
        replaced: Pairs of a replaced function or class and its replacement, which may hold it.

    Returns:
        For each pair, one phrase for each holder, sorted.
    """
    if not replaced:
        return []
    replacements = {id(old): new for old, new in replaced}
    found: dict[int, set[str]] = {key: set() for key in replacements}
    own = {id(replaced), *map(id, replaced)}
    with no_exemptions():
        containers = {
            id(one): one
            for one in gc.get_referrers(*(old for old, _ in replaced))
            if isinstance(one, tuple | dict | list | set) and id(one) not in own and _module_of(one) is None
        }
        owners = gc.get_referrers(*containers.values())
    for owner in owners:
        for value, place in _held(owner, containers, found):
            if owner is not replacements[id(value)]:
                found[id(value)].add(place)
    return [sorted(found[id(old)]) for old, _ in replaced]


def _held(owner: Any, containers: Mapping[int, Any], wanted: Collection[int]) -> Iterator[tuple[Any, str]]:
    """Yield the wanted objects, given by identity, that an object holds in the containers, and their place in words."""
    if isinstance(owner, FunctionType):
        for defaults in (owner.__defaults__, owner.__kwdefaults__):
            if id(defaults) in containers:
                place = f"a default argument of {owner.__module__}.{owner.__qualname__}"
                yield from ((value, place) for value in gc.get_referents(defaults) if id(value) in wanted)
    elif isinstance(owner, type):
        for name, value in list(vars(owner).items()):
            if id(value) in wanted:
                yield value, f"{owner.__module__}.{owner.__qualname__}.{name}"
    elif isinstance(owner, dict) and (module := _module_of(owner)) is not None:
        for name, container in list(owner.items()):
            public = isinstance(name, str) and not name.startswith("__")
            if public and id(container) in containers and not isinstance(container, tuple):
                # Not by iteration, which is code of the container's class.
                inside = gc.get_referents(container)
                yield from ((value, f"{module.__name__}.{name}") for value in inside if id(value) in wanted)


def _module_of(namespace: Any) -> ModuleType | None:
    """Return the module whose global names a dictionary holds; None if it is another container."""
    name = dict.get(namespace, "__name__") if isinstance(namespace, dict) else None
    module = sys.modules.get(name) if type(name) is str else None
    return module if isinstance(module, ModuleType) and vars(module) is namespace else None
