"""Decide which patch comes after which, and refuse two that would hide each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.errors import PatchError
from anytron.patches.patch import Phase
from anytron.patches.plan import Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anytron.patches.patch import Patch

_PHASES = tuple(Phase)


def check_targets(patches: Mapping[str, Patch]) -> None:
    """Hold all patches against each other; those that this environment skips conflict with nobody.

    Raises:
        PatchError: Two owners change one target and neither says with ``after`` that it builds upon
            the other; ``after`` names no patch of the same target, one of a later phase, or itself
            by a detour.
    """
    for patch in patches.values():
        _check_after(patch, patches)
    everything = list(patches.values())
    for number, later in enumerate(everything):
        for earlier in everything[:number]:
            if earlier.target != later.target or earlier.owner == later.owner:
                continue
            if earlier.id in _ancestors(later, patches) or later.id in _ancestors(earlier, patches):
                continue
            if any(judge(patch).verdict is not Verdict.APPLIES for patch in (earlier, later)):
                continue
            raise PatchError(
                f"two owners patch {later.target}",
                where=f"{earlier.id} of {earlier.owner}, and {later.id} of {later.owner}",
                why="the second would hide the first",
                fix=f"remove one, or let the second say after={earlier.id!r} if it keeps the first one's effect",
            )


def in_order(pending: Sequence[Patch], patches: Mapping[str, Patch]) -> list[Patch]:
    """Return the patches of one phase as they were added: each after its ``after``, and what imports a package last."""
    names = {patch.id for patch in pending}
    placed: dict[str, Patch] = {}
    for patch in pending:
        chain = [patches[name] for name in _ancestors(patch, patches) if name in names]
        for one in [*reversed(chain), patch]:
            placed.setdefault(one.id, one)
    return sorted(placed.values(), key=lambda patch: bool(patch.imports))  # stable


def _check_after(patch: Patch, patches: Mapping[str, Patch]) -> None:
    if not patch.after:
        return
    base = patches.get(patch.after)
    if base is None or base.target != patch.target:
        raise PatchError(
            f"patch {patch.id} builds upon {patch.after}, which is not there",
            where=patch.target,
            why="no patch of this target has that id",
        )
    if _PHASES.index(base.phase) > _PHASES.index(patch.phase):
        raise PatchError(
            f"patch {patch.id} builds upon {patch.after}, which comes later",
            where=patch.target,
            why=f"{base.id} belongs to phase {base.phase.value}, {patch.id} to {patch.phase.value}",
        )
    if patch.id in _ancestors(patch, patches):
        raise PatchError(f"patch {patch.id} builds upon itself", where=patch.target, why=f"after={patch.after!r}")


def _ancestors(patch: Patch, patches: Mapping[str, Patch]) -> list[str]:
    """Ids of the patches that ``patch`` builds upon, nearest first.

    An owner's own patches of one target build upon each other in the order of adding.
    """
    found: list[str] = []
    pending = list(_parents(patch, patches.values()))
    while pending:
        name = pending.pop(0)
        if name in found or name not in patches:
            continue
        found.append(name)
        pending += _parents(patches[name], patches.values())
    return found


def _parents(patch: Patch, patches: Iterable[Patch]) -> list[str]:
    own = []
    for other in patches:
        if other is patch:
            break
        if other.owner == patch.owner and other.target == patch.target:
            own.append(other.id)
    return ([patch.after] if patch.after else []) + own[-1:]
