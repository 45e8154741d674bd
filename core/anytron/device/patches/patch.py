"""Define a patch: a record that can be listed, verified and undone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from collections.abc import Callable


class Phase(str, Enum):
    """When a patch is applied, in this order."""

    BEFORE_IMPORT = "before_import"
    """Before this process imports the package that the patch is for."""
    BEFORE_PARALLEL_INIT = "before_parallel_init"
    """After the engine is imported, before process groups exist."""
    BEFORE_BUILD = "before_build"
    """After process groups exist, before a model does."""
    AFTER_BUILD = "after_build"
    """After the model is built."""


class Outcome(str, Enum):
    """The outcome of a patch."""

    APPLIED = "applied"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    """A class that inherits from the target defines its own version: the patch does not reach it."""
    FAILED = "failed"
    UNDONE = "undone"


@dataclass(frozen=True)
class Supersession:
    """A subclass of the target's class that needs no patch, because it defines its own version.

    Attributes:
        target: The subclass's own version of the patched attribute, ``module:attribute.path``.
        package: Distribution that contains the subclass.
        requires: PEP 440 range of ``package`` in which the class defines it; empty = any.
        reason: Why the class needs no patch.
    """

    target: str
    package: str
    requires: str
    reason: str


@dataclass(frozen=True)
class Patch:
    """One change of third-party code.

    Exactly one of ``replacement`` and ``install`` is given. Both name a function, ``module:function``, that is
    imported when the patch is applied, so that a list of patches imports nothing.

    Attributes:
        id: Unique name, for example ``megatron.rng-state-device``.
        owner: The plugin or backend that is responsible for it; default: the id up to its first dot.
        target: What the patch changes, ``module:attribute.path`` (or ``module`` for a whole module).
        phase: When the patch is applied.
        reason: Why the patch is needed, for a person who wants to remove it.
        package: Distribution whose installed version determines whether the patch applies; empty = always.
        requires: PEP 440 range of ``package`` that has the fault; empty = any.
        required: True: the run stops if the patch cannot be applied. False: the failure is only reported.
        upstream: Link or reference to the upstream issue, or the place of the fault.
        remove_when: The upstream change that makes the patch unnecessary.
        before: ``before_import`` only: the package that must not be imported yet, if it is not the target's own: a
            patch of ``torch.cuda`` for Megatron, for example.
        imports: ``before_import`` only: a package that the patch itself imports. The patch is applied last, after all
            patches that must come before that package.
        replacement: Function that receives the original object and returns the one that replaces it.
        install: Function that makes a change of more than one attribute (a module alias, a set of wrappers). It
            receives the ledger's context (:class:`anytron.device.hooks.types.PatchContext`) and returns an
            :class:`Installed`.
        rebinds: True: the original is also replaced in other modules that imported it by name. Set it to False if the
            target is itself such a name, and all other modules need the original.
        superseded_by: Classes that the patch does not reach because they define their own version.
        stays: Effects that undoing the patch cannot revert (such as importing a package), for the record.
    """

    id: str
    target: str
    phase: Phase
    reason: str
    owner: str = ""
    package: str = ""
    requires: str = ""
    required: bool = True
    upstream: str = ""
    remove_when: str = ""
    before: str = ""
    imports: str = ""
    replacement: str = ""
    install: str = ""
    rebinds: bool = True
    superseded_by: tuple[Supersession, ...] = ()
    stays: str = ""

    def __post_init__(self) -> None:
        if not self.owner:
            object.__setattr__(self, "owner", self.id.partition(".")[0])
        if bool(self.replacement) == bool(self.install):
            raise ValueError(f"patch {self.id}: give exactly one of replacement and install")
        if not all(str(self.replacement or self.install).partition(":")):
            raise ValueError(f"patch {self.id}: replacement and install must name a function as module:function")
        if self.replacement and not self.attribute:
            raise ValueError(f"patch {self.id}: a replacement needs a target of the form module:attribute")
        if self.requires and not self.package:
            raise ValueError(f"patch {self.id}: requires={self.requires!r} is a range of package, which is not given")
        if self.before and self.phase is not Phase.BEFORE_IMPORT:
            raise ValueError(f"patch {self.id}: before={self.before!r} may be given only in the phase before_import")
        if self.imports and self.phase is not Phase.BEFORE_IMPORT:
            raise ValueError(f"patch {self.id}: imports={self.imports!r} may be given only in the phase before_import")
        for requires in (self.requires, *(one.requires for one in self.superseded_by)):
            SpecifierSet(requires)  # InvalidSpecifier is a ValueError

    @property
    def module(self) -> str:
        """The module part of the target."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """The attribute part of the target, dotted; empty if the target is a whole module."""
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Installed:
    """The result of an ``install`` function.

    Attributes:
        undo: Function that reverts the change.
        detail: A description of the change, for the record.
    """

    undo: Callable[[], None]
    detail: str = ""


@dataclass(frozen=True)
class PatchRecord:
    """The outcome of a patch in this process, as ``patches.json`` shows it."""

    patch: Patch
    outcome: Outcome
    detail: str
    installed_version: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the record as ``patches.json`` and a checkpoint's manifest hold it."""
        return {
            "id": self.patch.id,
            "owner": self.patch.owner,
            "target": self.patch.target,
            "phase": self.patch.phase.value,
            "required": self.patch.required,
            "outcome": self.outcome.value,
            "detail": self.detail,
            "requires": f"{self.patch.package}{self.patch.requires}",
            "installed": self.installed_version,
            "reason": self.patch.reason,
            "stays": self.patch.stays,
            "upstream": self.patch.upstream,
            "remove_when": self.patch.remove_when,
        }
