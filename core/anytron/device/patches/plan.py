"""Determine, before a run, which patches it would apply or skip, and why. This imports and changes nothing."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, replace
from enum import Enum
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from anytron.base.errors import PatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anytron.device.patches.patch import Patch

_DYNAMIC = {"globals", "vars", "locals", "setattr", "exec", "__getattr__"}
"""Names by which the source of a module or class may define more than it shows."""


class Verdict(str, Enum):
    """Whether a patch applies to the installed versions."""

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
        target: The patch's target, or a subclass's own version of it, which the patch does not reach.
        package: The distribution whose version determines whether the patch applies; empty = always.
        requires: PEP 440 range in which that version must lie; empty = any.
        installed: Installed version of ``package``; empty if it is not installed.
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

        In the row, ``reason`` is the reason for the verdict, and ``purpose`` is why the patch is needed.
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


def plan(patches: Iterable[Patch]) -> list[Judgement]:
    """Judge every patch by version and target; after a patch that applies come the classes that it does not reach."""
    judgements = []
    for patch in patches:
        judgement = judge(patch)
        if judgement.verdict is Verdict.APPLIES and (missing := missing_target(patch)):
            judgement = replace(judgement, verdict=Verdict.MISSING, why=missing)
        judgements.append(judgement)
        if judgement.verdict is Verdict.APPLIES:
            judgements += supersessions(patch)
    return judgements


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
        why = "the patch applies to every version"
    return Judgement(patch, patch.target, patch.package, patch.requires, version, verdict, why)


def supersessions(patch: Patch) -> list[Judgement]:
    """List the classes of installed packages that override the target, so that the patch has no effect on them."""
    found = []
    for one in patch.superseded_by:
        version = installed_version(one.package)
        if version and in_range(version, one.requires):
            found.append(
                Judgement(patch, one.target, one.package, one.requires, version, Verdict.SUPERSEDED, one.reason)
            )
    return found


def missing_target(patch: Patch) -> str:
    """Return which part of a patch's target does not exist in this environment.

    Looks into the module if it is imported already, otherwise into its source.

    Returns:
        One phrase; empty if the target exists, if only an import could tell (extension modules, star imports,
        inherited methods), or if the patch has an ``install`` function and needs no original.
    """
    if not patch.replacement:
        return ""
    path = patch.attribute.split(".")
    loaded = sys.modules.get(patch.module)
    if loaded is not None:
        return _missing_in_object(loaded, patch.module, path)
    spec = _find_spec(patch.module)
    if spec is None:
        return f"there is no module {patch.module}"
    if spec.origin is None or not spec.origin.endswith(".py") or _find_spec(f"{patch.module}.{path[0]}"):
        return ""
    return _missing_in_source(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), patch.module, path)


def _missing_in_object(value: Any, name: str, path: Sequence[str]) -> str:
    for part in path:
        if not hasattr(value, part):
            return f"{name} has no attribute {part}"
        value, name = getattr(value, part), f"{name}.{part}"
    return ""


def _missing_in_source(scope: ast.AST, name: str, path: Sequence[str]) -> str:
    """Look for a name in a scope and, if it is a class without bases, for the next name in that class."""
    nodes = list(ast.walk(scope))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == path[0]]
    names = set().union(*map(_names, nodes))
    if path[0] not in names and not names & {"*", *_DYNAMIC}:
        return f"{name} has no attribute {path[0]}"
    if len(path) > 1 and len(classes) == 1 and [ast.unparse(base) for base in classes[0].bases] in ([], ["object"]):
        return _missing_in_source(classes[0], f"{name}.{path[0]}", path[1:])
    return ""


def _names(node: ast.AST) -> set[str]:
    """Return the names that a piece of source defines or uses."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    return {node.id} if isinstance(node, ast.Name) else set()


def _find_spec(module: str) -> ModuleSpec | None:
    """Find a module as the import system would, without importing the packages that it lies in."""
    path: Sequence[str] | None = None
    spec = None
    parts = module.split(".")
    for number in range(len(parts)):
        if number and path is None:
            return None
        name = ".".join(parts[: number + 1])
        spec = _spec_in(name, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _spec_in(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module in the folders of its package; None = at the top level."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    try:
        return next(filter(None, (finder.find_spec(name, path) for finder in finders)), None)
    except (
        KeyError
    ):  # of a folder without __init__.py, whose package must be imported: importlib asks sys.modules for it
        spec = ModuleSpec(name, None, is_package=True)
        folders = (Path(place) / name.rpartition(".")[2] for place in path or ())
        spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
        return spec


def installed_version(package: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def in_range(version: str, specifier: str) -> bool:
    """Tell whether ``version`` lies in the PEP 440 range ``specifier``.

    A pre-release counts as the version that it leads to: ``0.16.2rc1`` is code of 0.16.2, so it lies
    in ``>=0.16.2`` and outside of ``<0.16.2``. PEP 440 puts it in neither, so that a patch for
    ``<0.16.2`` and its successor for ``>=0.16.2`` would both be skipped. A range that names a
    pre-release (``<0.16.2rc2``) is compared exactly. Local labels (``+cu128``) never count.

    Raises:
        packaging.specifiers.InvalidSpecifier: ``specifier`` is not a PEP 440 range.
        packaging.version.InvalidVersion: ``version`` is not a PEP 440 version.
    """
    found = Version(version)
    wanted = SpecifierSet(specifier)
    exact = any(_names_prerelease(clause.version) for clause in wanted)
    comparable = found.base_version if found.is_prerelease and not exact else found.public
    return wanted.contains(comparable, prereleases=True)


def _names_prerelease(clause_version: str) -> bool:
    try:
        return Version(clause_version).is_prerelease
    except InvalidVersion:  # `==1.2.*` is a legal clause and not a version
        return False


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
                f"Patches of two owners change {target}.",
                where=", and ".join(f"{patch.id} of {owner}" for owner, patch in by_owner.items()),
                why="the patch that is applied second would hide the first one",
                fix="remove one of the patches, or set ANYTRON_DISABLE_PLUGINS to the name of a plugin that has one",
            )
