"""Refuse a target that two owners patch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import PatchError
from anytron.device.patches.plan import Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anytron.device.patches.patch import Patch


def check_targets(patches: Iterable[Patch]) -> None:
    """Check that no two owners change one target; patches that this environment skips do not count.

    Raises:
        PatchError: Two owners change one target.
    """
    by_target: dict[str, list[Patch]] = {}
    for patch in patches:
        by_target.setdefault(patch.target, []).append(patch)
    for target, several in by_target.items():
        if len({patch.owner for patch in several}) == 1:
            continue
        by_owner = {patch.owner: patch for patch in several if judge(patch).verdict is Verdict.APPLIES}
        if len(by_owner) > 1:
            raise PatchError(
                f"Two owners patch {target}.",
                where=", and ".join(f"{patch.id} of {owner}" for owner, patch in by_owner.items()),
                why="the second would hide the first",
                fix="remove one of the patches, or disable one of the plugins (ANYTRON_DISABLE_PLUGINS)",
            )
