"""Tell before a run which patches it would apply, which not, and why. This imports and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from anytron.device.patches.targets import missing_target
from anytron.device.patches.versions import in_range, installed_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anytron.device.patches.patch import Patch


class Verdict(str, Enum):
    """The verdict of the installed versions on a patch."""

    APPLIES = "applies"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    MISSING = "target missing"
    """The version is in the range, but has no such target: a required patch would stop the run."""


@dataclass(frozen=True)
class Judgement:
    """A verdict on one target of a patch.

    Attributes:
        patch: The patch.
        target: The patch's target, or the class that supersedes it there.
        package: The distribution whose version decides; empty if none does.
        requires: The range that the version must lie in.
        installed: Its version; empty if it is not installed.
        verdict: Whether the patch applies to ``target``.
        why: The reason for the verdict.
    """

    patch: Patch
    target: str
    package: str
    requires: str
    installed: str
    verdict: Verdict
    why: str

    def as_json(self) -> dict[str, Any]:
        """Return one row of ``anytron patches list --json``.

        ``reason`` is the reason of the verdict; ``purpose`` what the patch is for.
        """
        return {
            "id": self.patch.id,
            "owner": self.patch.owner,
            "target": self.target,
            "phase": self.patch.phase.value,
            "required": self.patch.required,
            "requires": f"{self.package}{self.requires}",
            "installed": self.installed,
            "verdict": self.verdict.value,
            "reason": self.why,
            "purpose": self.patch.reason,
            "stays": self.patch.stays,
            "upstream": self.patch.upstream,
            "remove_when": self.patch.remove_when,
        }


def judge(patch: Patch) -> Judgement:
    """Decide by the installed version whether ``patch`` applies."""
    version = installed_version(patch.package) if patch.package else ""
    verdict = Verdict.APPLIES
    if patch.package and not version:
        verdict, why = Verdict.SKIPPED, f"{patch.package} is not installed"
    elif patch.requires and not in_range(version, patch.requires):
        verdict, why = Verdict.SKIPPED, f"{patch.package} {version} is outside of {patch.requires}"
    elif patch.requires:
        why = f"{patch.package} {version} is in {patch.requires}"
    elif patch.package:
        why = f"{patch.package} {version} is installed, and the patch is for every version"
    else:
        why = "the patch depends on no version"
    return Judgement(patch, patch.target, patch.package, patch.requires, version, verdict, why)


def plan(patches: Iterable[Patch]) -> list[Judgement]:
    """Judge every patch by version and target; one that applies is followed by the classes that supersede it here."""
    judgements = []
    for patch in patches:
        judgement = judge(patch)
        if judgement.verdict is Verdict.APPLIES and (missing := missing_target(patch)):
            judgement = replace(judgement, verdict=Verdict.MISSING, why=missing)
        judgements.append(judgement)
        if judgement.verdict is Verdict.APPLIES:
            judgements += supersessions(patch)
    return judgements


def supersessions(patch: Patch) -> list[Judgement]:
    """List the classes that, in the installed versions, define their own version of the target."""
    found = []
    for one in patch.superseded_by:
        version = installed_version(one.package)
        if version and in_range(version, one.requires):
            found.append(
                Judgement(patch, one.target, one.package, one.requires, version, Verdict.SUPERSEDED, one.reason)
            )
    return found
