"""Find packages that are installed twice, and compare installed versions with every version range that is required.

The ranges are read from their usual places: in the hook ``requirements`` of plugins, and in the metadata of
distributions (``pyproject.toml``). There is no table of versions here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Dependency
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from anytron.base.results import Result, of_error, worst
from anytron.proof.doctor.modules import components, copies, everything, installed, origin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.components import Component
    from anytron.base.results import Status
    from anytron.device.hooks.types import Requirement
    from anytron.proof.doctor.subject import Subject


_REMEDY = "keep one copy: pip uninstall the others, or remove their folders from PYTHONPATH and from *.pth files"


def examine_duplicates(subject: Subject) -> Iterator[Result]:
    """Find packages that are installed twice or hidden, from metadata, ``sys.path`` and the current directory."""
    own = components(subject)
    found = [*_installed_twice({canonicalize_name(one.distribution) for one in own})]
    for one in own:
        found += _copies_of(one)
        found += _current_directory(one)
    yield from found or [
        Result("duplicates.none", "passed", f"no package is found twice in the {len(sys.path)} places of sys.path")
    ]


def _installed_twice(needed: set[str]) -> Iterator[Result]:
    """Distributions whose metadata are found more than once. Which of them pip, and which Python sees, is chance."""
    for name, places in sorted(everything().items()):
        if len(places) > 1:
            listed = "; ".join(f"{one.version} in {one.locate_file('')}" for one in places)
            status: Status = "failed" if name in needed or name.startswith("anytron") else "warning"
            fix = f"pip uninstall {name} until none is left, then pip install it once"
            yield Result(f"duplicates.{name}", status, f"installed {len(places)} times: {listed}", fix)


def _copies_of(component: Component) -> Iterator[Result]:
    """A module that is loaded from elsewhere than its distribution says, and modules that an earlier one hides."""
    found = copies(component.module)
    if not found:
        return
    first, *hidden = found
    name = f"duplicates.{component.module}"
    owner = installed(component.distribution, component.module)
    others = f"; it hides {', '.join(map(str, hidden))}" if hidden else ""
    if owner is not None and not _is_below(first, owner.place):
        detail = f"loaded from {first}, and {owner.name} {owner.version} is installed in {owner.place}{others}"
        # What is edited is often tried from another checkout; a wheel's version says nothing of other files.
        status: Status = "warning" if owner.editable else "failed"
        yield Result(name, status, detail, f"version checks do not see these files: {_REMEDY}")
    elif hidden:
        yield Result(name, "warning", f"loaded from {first}{others}", _REMEDY)


def _current_directory(component: Component) -> Iterator[Result]:
    """A folder or a file here with a package's name: programs that are started here may import it."""
    top = component.module.partition(".")[0]
    here = Path.cwd()
    like = [path for path in (here / top, here / f"{top}.py") if path.exists()]
    loaded = origin(component.module)
    for path in like:
        if loaded is not None and not _is_below(loaded, path):
            detail = f"{path} has the name of the package that is loaded from {loaded}"
            fix = (
                f"rename {path.name}, or start in another directory: python -m and scripts import what lies beside them"
            )
            yield Result(f"duplicates.{path.name}", "warning", detail, fix)


def _is_below(path: Path, folder: Path) -> bool:
    """Whether one lies in the other, as the paths are written (an installer may link packages) or as they resolve."""
    pairs = ((path.absolute(), folder.absolute()), (path.resolve(), folder.resolve()))
    return any(inner.is_relative_to(outer) for inner, outer in pairs)


OURS = "anytron"


@dataclass(frozen=True)
class Demand:
    """A version range that a plugin or a distribution requires.

    Attributes:
        package: Canonical name of the package that is required.
        specifier: PEP 440 range of versions; empty = any version.
        by: Plugin or distribution that requires the package.
        unmet: Status of the result if the package is missing or its version is not in the range.
        optional: Whether the package may be missing.
        remedy: Command that installs the package; empty = none is known.
    """

    package: str
    specifier: str
    by: str
    unmet: Status
    optional: bool = False
    remedy: str = ""

    def met_by(self, version: str | None) -> bool:
        """Whether a version is in the range; None = not installed, which only an optional demand allows."""
        if version is None:
            return self.optional
        return SpecifierSet(self.specifier).contains(version, prereleases=True)


def examine_compatibility(subject: Subject) -> Iterator[Result]:
    """Yield a result for each package outside of a range, and for each library that the run or a plugin needs."""
    demands, failures = _demands(subject)
    yield from failures
    shown: set[str] = {canonicalize_name(one.distribution) for one in components(subject)}
    shown |= {one.package for one in demands if one.by.startswith("plugin")}
    for package in sorted({one.package for one in demands}):
        asked = [one for one in demands if one.package == package]
        found = installed(package)
        version = None if found is None else found.version
        unmet = [one for one in asked if not one.met_by(version)]
        if unmet or (package in shown and (version is not None or not all(one.optional for one in asked))):
            yield _entry(package, version, asked, unmet)


def _entry(package: str, version: str | None, asked: list[Demand], unmet: list[Demand]) -> Result:
    have = "not installed" if version is None else f"{version} is installed"
    name = f"compatibility.{package}"
    if not unmet:
        ranges = "; ".join(f"{one.specifier or 'any'} ({one.by})" for one in asked)
        return Result(name, "passed", f"{version}; asked for: {ranges}" if version else f"{have}; optional: {ranges}")
    wants = "; ".join(f"{one.by} needs {package}{one.specifier}" for one in unmet)
    together = ",".join(sorted({part for one in asked for part in one.specifier.split(",") if part}))
    fixes = dict.fromkeys(one.remedy or f"pip install '{package}{together}'" for one in unmet)
    return Result(name, worst(one.unmet for one in unmet), f"{have}, and {wants}", "; ".join(fixes))


def _demands(subject: Subject) -> tuple[list[Demand], list[Result]]:
    demands: list[Demand] = []
    failures: list[Result] = []
    elsewhere: set[str] = set()
    if subject.session is not None:
        hooks = subject.session.hooks
        try:
            demands = [_of_plugin(plugin, need) for plugin, need in hooks.requirements(subject.engine)]
            of_any: set[str] = {canonicalize_name(need.package) for _, need in hooks.requirements(None)}
            elsewhere = of_any - {one.package for one in demands}  # of another engine: this one has its own versions
        except Exception as error:  # noqa: BLE001 - a plugin's own code; the ranges in metadata are compared all the same
            failures.append(of_error("compatibility.plugins", error))
    demands += [one for one in _of_distribution(OURS, "failed", extras=True) if one.package not in elsewhere]
    own = [one.distribution for one in components(subject)]
    for name in dict.fromkeys([*own, *(one.package for one in demands if one.optional)]):
        if name != OURS:
            demands += _of_distribution(name, "warning", extras=False)
    return demands, failures


def _of_plugin(plugin: str, need: Requirement) -> Demand:
    status: Status = "warning" if need.optional else "failed"
    name, by = canonicalize_name(need.package), f"plugin '{plugin}'"
    return Demand(name, need.specifier, by, status, need.optional, need.remedy)


def _of_distribution(name: str, unmet: Status, *, extras: bool) -> Iterator[Demand]:
    """The dependencies in a distribution's metadata; those of extras are optional."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    offered = found.metadata.get_all("Provides-Extra") or []
    for line in found.requires or ():
        try:
            need = Dependency(line)
        except InvalidRequirement:
            continue  # metadata of old build tools; pip warns of them
        by = f"{name} {found.version}"
        if _applies(need, ""):
            yield Demand(canonicalize_name(need.name), str(need.specifier), by, unmet)
            continue
        of_extra = [extra for extra in offered if extras and extra != "dev" and _applies(need, extra)]
        if of_extra:
            remedy = f"pip install 'anytron[{of_extra[0]}]'"
            by = f"{OURS}[{of_extra[0]}]"
            yield Demand(canonicalize_name(need.name), str(need.specifier), by, "warning", optional=True, remedy=remedy)


def _applies(need: Dependency, extra: str) -> bool:
    return need.marker is None or need.marker.evaluate({"extra": extra})
