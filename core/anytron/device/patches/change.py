"""Apply one patch, tell whether it is still in effect, and undo it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from anytron.base.errors import PatchError
from anytron.device.patches.rebind import Rebinding, can_be_found, rebind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CellType

    from anytron.device.patches.patch import Installed, Patch

ABSENT = object()
"""Marks an attribute that the owner does not define itself: it inherits one, or there is none."""


@dataclass
class Change:
    """An applied patch, with everything that is needed to verify and undo it.

    Attributes:
        patch: The patch.
        detail: What the patch changed and what it did not reach, for the record.
        owner: The object whose attribute was changed; None if the target is a whole module.
        name: Name of that attribute.
        before: The attribute before the patch, as ``owner`` itself stores it; :data:`ABSENT` if ``owner`` only
            inherited it.
        after: The attribute after the patch, as ``owner`` stores it.
        old: The original, which other modules may hold by name; :data:`ABSENT` if other modules are left as they are.
        new: The object that replaces ``old`` in these modules; :data:`ABSENT` if ``old`` is.
        uninstall: Function that undoes ``install``; None for a replacement.
        rebindings: The modules that were given ``new``.
    """

    patch: Patch
    detail: str = ""
    owner: Any = None
    name: str = ""
    before: Any = ABSENT
    after: Any = ABSENT
    old: Any = ABSENT
    new: Any = ABSENT
    uninstall: Callable[[], None] | None = None
    rebindings: list[Rebinding] = field(default_factory=list)

    @property
    def is_topmost(self) -> bool:
        """Whether the target holds exactly the object that this patch put there."""
        return not self.name or raw(self.owner, self.name) is self.after

    @property
    def is_in_effect(self) -> bool:
        """Whether a call of the target still reaches this patch: the target holds it, or something that wraps it."""
        return self.is_topmost or _wraps(raw(self.owner, self.name), self.after)

    def undo(self) -> None:
        """Undo the patch: restore the target, and the modules that were given the replacement.

        Raises:
            PatchError: After undoing, the target is not the object that it was before the patch.
        """
        if self.uninstall is not None:
            self.uninstall()
        else:
            for rebinding in reversed(self.rebindings):
                rebinding.undo()
            if self.before is ABSENT:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.before)
            if self.old is not ABSENT:
                # Modules that imported the replacement by name meanwhile get the original back.
                rebind([(self.new, self.old)])
        if self.name and raw(self.owner, self.name) is not self.before:
            raise PatchError(
                f"Undoing the patch {self.patch.id} did not restore {self.patch.target}.",
                where=self.patch.target,
                why="the target is not the object that it was before the patch",
                fix="let the function undo, which the patch's install returns, restore that object"
                if self.uninstall is not None
                else "start a new process; the module or class that has the target ignores or redirects assignments",
            )


def raw(owner: Any, name: str) -> Any:
    """Return an attribute as its owner stores it, descriptors unbound; :data:`ABSENT` if the owner only inherits it."""
    return vars(owner).get(name, ABSENT)


def resolve(target: str) -> tuple[Any, str]:
    """Import the module of ``module:attribute.path``; return (the object that has the attribute, its name)."""
    module, _, attribute = target.partition(":")
    owner: Any = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def make_change(patch: Patch, context: Any) -> Change:
    """Apply a patch.

    Args:
        patch: The patch.
        context: The argument of ``install`` functions.

    Raises:
        PatchError: Applying the patch left the target unchanged.
        Exception: Any error of the patch's own code, or of importing the target.
    """
    return _install(patch, context) if patch.install else _replace(patch)


def _function(name: str) -> Callable[..., Any]:
    """Import a patch's own function, ``module:function``."""
    owner, attribute = resolve(name)
    function: Callable[..., Any] = getattr(owner, attribute)
    return function


def _replace(patch: Patch) -> Change:
    """Put the replacement into the target, and into modules that hold the original by name."""
    owner, name = resolve(patch.target)
    before = raw(owner, name)
    original = before.__func__ if isinstance(before, staticmethod | classmethod) else getattr(owner, name)
    new = _function(patch.replacement)(original)
    after = type(before)(new) if isinstance(before, staticmethod | classmethod) else new
    change = Change(patch, owner=owner, name=name, before=before, after=after)

    setattr(owner, name, after)
    if raw(owner, name) is not after:
        change.undo()
        raise PatchError(
            f"{patch.target} could not be replaced.",
            where=f"patch {patch.id}",
            why="the module or class that has this attribute ignores or redirects the assignment",
            fix="give the patch a function install, instead of replacement, that makes the change in another way",
        )
    remarks = []
    if patch.rebinds and "." not in patch.attribute and can_be_found(original):
        change.old, change.new = original, new
        # Not in the module of the replacement itself, which may call the original by that name.
        home = getattr(new, "__globals__", {}).get("__name__")
        change.rebindings = rebind([(original, new)], lambda module: module != home)
        if change.rebindings:
            remarks.append("also rebound in " + ", ".join(map(str, change.rebindings)))
    known = {one.target for one in patch.superseded_by}
    if found := [own for own in overriders(owner, name) if own not in known]:
        remarks.append("not reached, because they define their own: " + ", ".join(found))
    change.detail = "; ".join(remarks)
    return change


def _install(patch: Patch, context: Any) -> Change:
    """Run the patch's own installer; a target with an attribute must be another object afterwards."""
    owner, name = resolve(patch.target) if patch.attribute else (None, "")
    before = raw(owner, name) if name else ABSENT
    installed: Installed = _function(patch.install)(context)
    after = raw(owner, name) if name else ABSENT
    if name and after is before:
        installed.undo()
        raise PatchError(
            f"{patch.target} is still the same object after install() of the patch {patch.id}.",
            where=patch.install,
            why="install must replace the attribute that the patch's target names",
            fix="let install replace it, or name in target only the module that install changes",
        )
    return Change(patch, installed.detail, owner, name, before, after, uninstall=installed.undo)


def overriders(owner: Any, name: str) -> list[str]:
    """Return the attributes of loaded subclasses of ``owner`` that override its attribute ``name``."""
    if not isinstance(owner, type):
        return []
    found: list[str] = []
    pending: list[type] = list(type.__subclasses__(owner))
    while pending:
        subclass = pending.pop()
        pending += type.__subclasses__(subclass)
        if name in vars(subclass):
            found.append(f"{subclass.__module__}:{subclass.__qualname__}.{name}")
    return sorted(set(found))


def _wraps(outer: Any, inner: Any) -> bool:
    """Whether ``outer`` holds ``inner`` by ``__wrapped__``, in a ``partial`` or in its closure."""
    seen: set[int] = set()
    pending = [outer]
    while pending:
        one = pending.pop()
        if one is inner:
            return True
        if id(one) in seen or not callable(getattr(one, "__func__", one)):
            continue
        seen.add(id(one))
        function = getattr(one, "__func__", one)
        pending.append(getattr(function, "__wrapped__", None))
        if isinstance(function, partial):
            pending.append(function.func)
        pending += map(_contents, getattr(function, "__closure__", None) or ())
    return False


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
