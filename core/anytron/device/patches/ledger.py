"""The ledger, which applies the patches of each phase, verifies that they are in effect, records and undoes them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anytron.base.errors import PatchError
from anytron.base.hidden import error_text
from anytron.device.patches.change import ABSENT, make_change
from anytron.device.patches.patch import Outcome, Patch, PatchRecord, Phase
from anytron.device.patches.plan import Verdict, check_targets, judge, supersessions
from anytron.device.patches.rebind import holders, leftovers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from anytron.device.patches.change import Change

_PHASES = tuple(Phase)


class Ledger:
    """The patches of this process.

    Within a phase, the ledger applies patches in the order in which they were added, each once; patches that import a
    package come last. If the installed version is not in a patch's range, it skips the patch and records the reason. It
    verifies each applied patch. Then modules that had imported the old object by name get the new one. The record's
    detail lists these modules, and the places that still hold the old object.

    Args:
        patches: The first patches; more may be added before their phase is applied.
        context: The argument of ``install`` functions, a :class:`anytron.device.hooks.types.PatchContext`. The ledger
            itself does not read it.

    Raises:
        PatchError: As :meth:`add`.
    """

    def __init__(self, patches: Iterable[Patch] = (), context: Any = None) -> None:
        self.context = context
        self._patches: dict[str, Patch] = {}
        self._records: dict[str, PatchRecord] = {}
        self._applied: list[Change] = []
        self._reached: Phase | None = None
        self.add(patches)

    @property
    def records(self) -> list[PatchRecord]:
        """One record for each patch that was tried so far, in the order in which they were tried."""
        return list(self._records.values())

    def has_reached(self, phase: Phase) -> bool:
        """Whether ``phase``, or a later one, was applied in this process."""
        return self._reached is not None and _PHASES.index(self._reached) >= _PHASES.index(phase)

    def knows(self, patch: Patch) -> bool:
        """Whether this very patch was added before; another patch with its id does not count."""
        return self._patches.get(patch.id) == patch

    def add(self, patches: Iterable[Patch]) -> None:
        """Accept patches, all or none, without applying them.

        Raises:
            PatchError: A patch with the same id exists already, two owners change one target in this environment, or
                the phase of a patch is over.
        """
        known = dict(self._patches)
        for patch in patches:
            self._check_name_and_phase(patch, known)
            known[patch.id] = patch
        check_targets(known.values())
        self._patches = known

    def apply(self, phase: Phase, patches: Iterable[Patch] = ()) -> list[PatchRecord]:
        """Add ``patches``, then apply everything of ``phase`` that was not tried yet.

        Patches that other code has overwritten since the previous phase are first applied again (:meth:`revalidate`).

        Returns:
            The records of ``phase``.

        Raises:
            PatchError: A later phase was applied before, a required patch could not be applied or
                verified, or a ``before_import`` patch came after its package; and as :meth:`add`.
        """
        self.add(patches)
        if self._reached is not None and _PHASES.index(phase) < _PHASES.index(self._reached):
            raise PatchError(
                f"Patches of the phase {phase.value} can no longer be applied.",
                why=f"the later phase {self._reached.value} has been applied already",
                fix=f"apply the phases in this order: {', '.join(one.value for one in Phase)}",
            )
        self.revalidate()
        self._reached = phase
        pending = [p for p in self._patches.values() if p.phase is phase and self._is_pending(p)]
        ordered = sorted(pending, key=lambda patch: bool(patch.imports))  # stable; those that import a package last
        with self._noting_leftovers():
            for patch in ordered:
                self._records[patch.id] = self._try(patch)
        return [self._records[patch.id] for patch in ordered]

    def verify(self) -> list[Patch]:
        """Return the applied patches that other code has overwritten, so that they are no longer in effect.

        A patch that was wrapped is still in effect; one that was replaced is not.
        """
        topmost = {change.patch.target: change for change in self._applied}  # later ones win: chains
        lost = {target for target, change in topmost.items() if not change.is_in_effect}
        return [change.patch for change in self._applied if change.patch.target in lost]

    def revalidate(self) -> list[PatchRecord]:
        """Apply overwritten patches again, on top of the objects that overwrote them.

        Call this, for example, after ``mindspeed.patch_utils`` has applied its own patches again: MindSpeed starts from
        the objects that it saw first, and so drops all other patches. A later :meth:`undo` restores the objects that
        the other code put there, not the ones before.

        Returns:
            The new records; none if everything was in effect.

        Raises:
            PatchError: A required patch could not be applied again; or an overwritten patch changes more than one
                attribute, and its other changes would be made twice.
        """
        lost = {patch.id for patch in self.verify()}
        composite = [change.patch for change in self._applied if change.patch.id in lost and change.patch.install]
        if composite:
            raise PatchError(
                f"Patches were overwritten and cannot be applied again: {', '.join(patch.id for patch in composite)}.",
                where=", ".join(patch.target for patch in composite),
                why="other code replaced the targets; applying these patches again would repeat their other changes",
                fix="apply these patches after the other code has made its changes",
            )
        dropped = [change for change in self._applied if change.patch.id in lost]
        self._applied = [change for change in self._applied if change.patch.id not in lost]
        for change in reversed(dropped):
            # The other party owns the target now; names in other modules go back to the original.
            for rebinding in reversed(change.rebindings):
                rebinding.undo()
            self._records[change.patch.id] = replace(self._records[change.patch.id], outcome=Outcome.UNDONE)
        with self._noting_leftovers():
            for change in dropped:
                record = self._change(change.patch, self._records[change.patch.id].installed_version)
                if record.outcome is Outcome.APPLIED:
                    record = _with_remark(record, "applied again after other code had replaced the target", first=True)
                self._records[change.patch.id] = record
        return [self._records[change.patch.id] for change in dropped]

    def undo(self, phase: Phase = Phase.BEFORE_IMPORT) -> None:
        """Undo, in reverse order, all patches of ``phase`` and of later phases; they may be applied again.

        Raises:
            PatchError: Other code has changed targets since. The patches of these targets stay, recorded as applied;
                all others are undone.
        """
        start = _PHASES.index(phase)
        seen: set[str] = set()
        overwritten: set[str] = set()
        kept: list[Change] = []
        for change in reversed(self._applied):
            # Asked at its turn: until then the target may hold what a later patch of another target has put there.
            if change.patch.target not in seen and not change.is_topmost:
                overwritten.add(change.patch.target)
            seen.add(change.patch.target)
            if _PHASES.index(change.patch.phase) < start or change.patch.target in overwritten:
                kept.append(change)
                continue
            change.undo()
            self._records[change.patch.id] = replace(self._records[change.patch.id], outcome=Outcome.UNDONE)
        self._applied = kept[::-1]
        if self._reached is not None and _PHASES.index(self._reached) >= start:
            self._reached = _PHASES[start - 1] if start else None
        foreign = [c.patch for c in self._applied if c.patch.target in overwritten]
        foreign = [patch for patch in foreign if _PHASES.index(patch.phase) >= start]
        if foreign:
            raise PatchError(
                f"Patches could not be undone: {', '.join(patch.id for patch in foreign)}.",
                where=", ".join(sorted({patch.target for patch in foreign})),
                why="other code changed the targets after these patches",
                fix="undo the changes of the other code first, then these patches",
            )

    def report(self) -> list[dict[str, Any]]:
        """Return all records, as ``patches.json`` and the manifests of checkpoints hold them.

        Each record is followed by the classes that supersede its patch.
        """
        rows: list[dict[str, Any]] = []
        for record in self._records.values():
            rows.append(record.as_json())
            if record.outcome is Outcome.APPLIED:
                rows += [
                    {
                        **record.as_json(),
                        "target": one.target,
                        "outcome": Outcome.SUPERSEDED.value,
                        "detail": one.why,
                        "requires": f"{one.package}{one.requires}",
                        "installed": one.installed,
                    }
                    for one in supersessions(record.patch)
                ]
        return rows

    def _is_pending(self, patch: Patch) -> bool:
        record = self._records.get(patch.id)
        return record is None or record.outcome is Outcome.UNDONE

    def _check_name_and_phase(self, patch: Patch, known: dict[str, Patch]) -> None:
        twin = known.get(patch.id)
        if twin is not None:
            raise PatchError(
                f"Two patches are called {patch.id}.",
                where=f"owners {twin.owner} and {patch.owner}",
                why="the id of a patch is its name in records, so it must be unique",
                fix="give one of the patches a different id",
            )
        if self._reached is not None and _PHASES.index(patch.phase) < _PHASES.index(self._reached):
            raise PatchError(
                f"Patch {patch.id} (owner {patch.owner}) was added too late.",
                where=patch.target,
                why=f"its phase {patch.phase.value} is over; the current phase is {self._reached.value}",
                fix=f"return it from patch_model in the call for phase {patch.phase.value}",
            )

    def _try(self, patch: Patch) -> PatchRecord:
        judgement = judge(patch)
        version = judgement.installed
        if judgement.verdict is Verdict.SKIPPED:
            return PatchRecord(patch, Outcome.SKIPPED, judgement.why, version)
        if patch.phase is Phase.BEFORE_IMPORT:
            _assert_not_imported(patch)
        return self._change(patch, version)

    @contextmanager
    def _noting_leftovers(self) -> Iterator[None]:
        """Add where the originals are still held to the records of the patches that are applied in the block."""
        before = len(self._applied)
        try:
            yield
        finally:
            searched = [change for change in self._applied[before:] if change.old is not ABSENT]
            try:
                found = leftovers([(change.old, change.new) for change in searched])
                remarks = [f"the original is still held by {', '.join(places)}" if places else "" for places in found]
            except Exception as error:  # noqa: BLE001 - foreign objects may fail in any way, and the patches are applied
                remarks = [f"its holders cannot be searched: {type(error).__name__}: {error}"] * len(searched)
            for change, remark in zip(searched, remarks, strict=True):
                self._records[change.patch.id] = _with_remark(self._records[change.patch.id], remark)

    def _change(self, patch: Patch, version: str) -> PatchRecord:
        try:
            change = make_change(patch, self.context)
        except Exception as error:  # foreign code may fail in any way; recorded or raised
            failed = PatchRecord(patch, Outcome.FAILED, error_text(error), version)
            self._records[patch.id] = failed
            if not patch.required:
                return failed
            raise PatchError(
                f"The required patch {patch.id} of {patch.owner} could not be applied.",
                where=f"{patch.target}" + (f" ({patch.package} {version})" if version else ""),
                why=failed.detail,
                fix=f"see {patch.upstream}" if patch.upstream else f"report this to the authors of {patch.owner}",
            ) from error
        self._applied.append(change)
        return PatchRecord(patch, Outcome.APPLIED, change.detail, version)


def _with_remark(record: PatchRecord, remark: str, *, first: bool = False) -> PatchRecord:
    remarks = (remark, record.detail) if first else (record.detail, remark)
    return replace(record, detail="; ".join(filter(None, remarks)))


def _assert_not_imported(patch: Patch) -> None:
    package = patch.before or patch.module
    if package not in sys.modules:
        return
    importers = holders(package)
    raise PatchError(
        f"Patch {patch.id} (owner {patch.owner}) was added too late.",
        where=patch.target,
        why=f"{package} is imported already" + (f", by {', '.join(importers)}" if importers else ""),
        fix=f"apply the before_import patches first; for this, move earlier imports of {package} into functions",
    )
