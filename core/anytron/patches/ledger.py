"""The ledger: it is given patches, applies those of a phase, verifies, records, and undoes them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anytron.errors import PatchError
from anytron.patches.patch import Outcome, Patch, PatchRecord, Phase
from anytron.patches.rebind import Rebinding, can_be_found, holders, rebind
from anytron.patches.versions import in_range, installed_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PHASES = tuple(Phase)
_ABSENT = object()


@dataclass(frozen=True)
class _Applied:
    """What is needed to verify and undo one applied patch."""

    patch: Patch
    undo: Callable[[], None]
    still_holds: Callable[[], bool]


class Ledger:
    """The patches of this process.

    Patches are applied in the order in which they were added, each once. A patch whose version
    range does not hold is skipped with its reason. What was applied is verified; then modules that
    had imported the old object by name are given the new one, and the record's detail lists them.

    Args:
        patches: The first patches; more may be added before their phase is applied.

    Raises:
        PatchError: As :meth:`add`.
    """

    def __init__(self, patches: Iterable[Patch] = ()) -> None:
        self._patches: dict[str, Patch] = {}
        self._records: dict[str, PatchRecord] = {}
        self._applied: list[_Applied] = []
        self._reached: Phase | None = None
        self.add(patches)

    @property
    def records(self) -> list[PatchRecord]:
        """What happened so far, in the order in which it was tried."""
        return list(self._records.values())

    def add(self, patches: Iterable[Patch]) -> None:
        """Take patches, without applying them.

        Raises:
            PatchError: An id exists already, two owners change one target without saying so with
                ``after``, ``after`` names no earlier patch of the same target, or the patch's phase
                has passed.
        """
        for patch in patches:
            self._check(patch)
            self._patches[patch.id] = patch

    def apply(self, phase: Phase, patches: Iterable[Patch] = ()) -> list[PatchRecord]:
        """Add ``patches``, then apply everything of ``phase`` that was not tried yet.

        Returns:
            Their records.

        Raises:
            PatchError: A later phase was applied before, a required patch could not be applied or
                verified, or a ``before_import`` patch came after its package; and as :meth:`add`.
        """
        self.add(patches)
        if self._reached is not None and _PHASES.index(phase) < _PHASES.index(self._reached):
            raise PatchError(
                f"phase {phase.value} cannot be applied any more",
                why=f"{self._reached.value} was applied before it",
                fix="apply the phases in their order",
            )
        self._reached = phase
        pending = [p for p in self._patches.values() if p.phase is phase and self._is_pending(p)]
        for patch in pending:
            self._records[patch.id] = self._try(patch)
        return [self._records[patch.id] for patch in pending]

    def verify(self) -> list[Patch]:
        """Return the applied patches whose target does not hold the replacement any more.

        Someone patched over them (``mindspeed.patch_utils`` re-applies its own, for example).
        """
        topmost = {entry.patch.target: entry for entry in self._applied}  # later entries win: chains
        return [entry.patch for entry in topmost.values() if not entry.still_holds()]

    def undo(self, phase: Phase = Phase.BEFORE_IMPORT) -> None:
        """Undo, in reverse, everything applied in ``phase`` and later; it may be applied again.

        Raises:
            PatchError: Somebody else has changed a target since. All others are undone; those are
                left as they are, and stay recorded as applied.
        """
        start = _PHASES.index(phase)
        overwritten = {patch.target for patch in self.verify()}
        kept: list[_Applied] = []
        for entry in reversed(self._applied):
            if _PHASES.index(entry.patch.phase) < start or entry.patch.target in overwritten:
                kept.append(entry)
                continue
            entry.undo()
            self._records[entry.patch.id] = replace(self._records[entry.patch.id], outcome=Outcome.UNDONE)
        self._applied = kept[::-1]
        foreign = [e.patch for e in self._applied if e.patch.target in overwritten]
        if foreign:
            raise PatchError(
                "patches could not be undone: " + ", ".join(patch.id for patch in foreign),
                where=", ".join(sorted(overwritten)),
                why="the targets were changed by someone else after these patches",
                fix="undo the other change first",
            )
        if self._reached is not None and _PHASES.index(self._reached) >= start:
            self._reached = _PHASES[start - 1] if start else None

    def report(self) -> list[dict[str, str]]:
        """Return the records as ``patches.json`` holds them: a list of objects with string values."""
        return [
            {
                "id": record.patch.id,
                "owner": record.patch.owner,
                "target": record.patch.target,
                "phase": record.patch.phase.value,
                "outcome": record.outcome.value,
                "reason": record.patch.reason,
                "requires": f"{record.patch.package}{record.patch.requires}",
                "installed": record.installed_version,
                "detail": record.detail,
                "upstream": record.patch.upstream,
                "remove_when": record.patch.remove_when,
            }
            for record in self._records.values()
        ]

    def _is_pending(self, patch: Patch) -> bool:
        record = self._records.get(patch.id)
        return record is None or record.outcome is Outcome.UNDONE

    def _check(self, patch: Patch) -> None:
        twin = self._patches.get(patch.id)
        if twin is not None:
            raise PatchError(
                f"two patches are called {patch.id}",
                where=f"owners {twin.owner} and {patch.owner}",
                fix="give one of them another id",
            )
        rivals = [p for p in self._patches.values() if p.target == patch.target and p.owner != patch.owner]
        if rivals and patch.after not in {p.id for p in rivals}:
            rival = rivals[-1]
            raise PatchError(
                f"two owners patch {patch.target}",
                where=f"{rival.id} of {rival.owner}, and {patch.id} of {patch.owner}",
                why="the second would hide the first",
                fix=f"remove one of them, or let the second say after={rival.id!r} if it keeps the first one's effect",
            )
        if patch.after and not any(p.id == patch.after and p.target == patch.target for p in self._patches.values()):
            raise PatchError(
                f"patch {patch.id} builds upon {patch.after}, which is not there",
                where=patch.target,
                why="no earlier patch of this target has that id",
            )
        if self._reached is not None and _PHASES.index(patch.phase) < _PHASES.index(self._reached):
            raise PatchError(
                f"patch {patch.id} of {patch.owner} comes too late",
                where=patch.target,
                why=f"its phase {patch.phase.value} has passed; {self._reached.value} was reached",
                fix="return it from patch_model when that phase is asked for",
            )

    def _try(self, patch: Patch) -> PatchRecord:
        version = installed_version(patch.package) if patch.package else ""
        if patch.package and not version:
            return PatchRecord(patch, Outcome.SKIPPED, f"{patch.package} is not installed")
        if patch.requires and not in_range(version, patch.requires):
            detail = f"{patch.package} {version} is outside of {patch.requires}"
            return PatchRecord(patch, Outcome.SKIPPED, detail, version)
        if patch.phase is Phase.BEFORE_IMPORT:
            _assert_not_imported(patch)
        try:
            entry, detail = _install(patch) if patch.install else _replace(patch)
        except Exception as error:  # foreign code may fail in any way; recorded or raised
            failed = PatchRecord(patch, Outcome.FAILED, f"{type(error).__name__}: {error}", version)
            self._records[patch.id] = failed
            if not patch.required:
                return failed
            raise PatchError(
                f"required patch {patch.id} of {patch.owner} could not be applied",
                where=f"{patch.target}" + (f" ({patch.package} {version})" if version else ""),
                why=failed.detail,
                fix=patch.upstream and f"see {patch.upstream}",
            ) from error
        self._applied.append(entry)
        return PatchRecord(patch, Outcome.APPLIED, detail, version)


def _assert_not_imported(patch: Patch) -> None:
    package = patch.before or patch.module
    if package not in sys.modules:
        return
    importers = holders(package)
    raise PatchError(
        f"patch {patch.id} of {patch.owner} comes too late",
        where=patch.target,
        why=f"{package} is imported already" + (f", by {', '.join(importers)}" if importers else ""),
        fix=f"apply the before_import patches first, and import {package} inside functions until then",
    )


def _resolve(patch: Patch) -> tuple[Any, str]:
    """Import the target's module and return (the object that has the attribute, its name)."""
    owner: Any = importlib.import_module(patch.module)
    *path, name = patch.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def _raw(owner: Any, name: str) -> Any:
    """The attribute as its owner stores it: descriptors unbound, inherited ones absent."""
    return vars(owner).get(name, _ABSENT)


def _replace(patch: Patch) -> tuple[_Applied, str]:
    """Put the replacement in its place, here and in modules that hold the original by name."""
    assert patch.replacement is not None
    owner, name = _resolve(patch)
    raw = _raw(owner, name)
    original = raw.__func__ if isinstance(raw, staticmethod | classmethod) else getattr(owner, name)
    new = patch.replacement(original)
    stored = type(raw)(new) if isinstance(raw, staticmethod | classmethod) else new

    setattr(owner, name, stored)
    rebindings: list[Rebinding] = []

    def undo() -> None:
        for rebinding in reversed(rebindings):
            rebinding.undo()
        if raw is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, raw)
        # Whoever imported the replacement by name in between gets the original back.
        if module_level:
            rebind([(new, original)])

    module_level = "." not in patch.attribute and can_be_found(original)
    if _raw(owner, name) is not stored:
        undo()
        raise PatchError(f"{patch.target} did not take its replacement", why="its owner intercepts assignment")
    if module_level:
        # Not where the replacement itself lives: it may call the original under that very name.
        home = getattr(new, "__globals__", {}).get("__name__")
        rebindings += rebind([(original, new)], lambda module: module != home)
    detail = "also rebound in " + ", ".join(map(str, rebindings)) if rebindings else ""
    return _Applied(patch, undo, lambda: _raw(owner, name) is stored), detail


def _install(patch: Patch) -> tuple[_Applied, str]:
    """Run the patch's own installer; a target with an attribute must be another object afterwards."""
    assert patch.install is not None
    describe = patch.describe or str  # str() is the empty string
    if not patch.attribute:
        undo = patch.install()
        return _Applied(patch, undo, lambda: True), describe()
    owner, name = _resolve(patch)
    before = _raw(owner, name)
    undo = patch.install()
    after = _raw(owner, name)
    if after is before:
        undo()
        raise PatchError(f"{patch.target} is unchanged after its patch was installed")
    return _Applied(patch, undo, lambda: _raw(owner, name) is after), describe()
