"""Find what is there twice: distributions, modules, and folders that look like a package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from anytron.base.results import Result
from anytron.proof.doctor.modules import copies, everything, installed, origin
from anytron.proof.doctor.versions import components

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.components import Component
    from anytron.base.results import Status
    from anytron.proof.doctor.subject import Subject

_REMEDY = "keep one: pip uninstall the other, or take its folder out of PYTHONPATH and of *.pth files"


def examine(subject: Subject) -> Iterator[Result]:
    """Compare metadata, ``sys.path`` and the current directory."""
    own = components(subject)
    found = [*_distributions({canonicalize_name(one.distribution) for one in own})]
    for one in own:
        found += _module(one)
        found += _current_directory(one)
    yield from found or [
        Result("duplicates.none", "passed", f"each of {len(sys.path)} places on sys.path adds its own")
    ]


def _distributions(needed: set[str]) -> Iterator[Result]:
    """Distributions whose metadata are found more than once. Which of them pip, and which Python sees, is chance."""
    for name, places in sorted(everything().items()):
        if len(places) > 1:
            listed = "; ".join(f"{one.version} in {one.locate_file('')}" for one in places)
            status: Status = "failed" if name in needed or name.startswith("anytron") else "warning"
            fix = f"pip uninstall {name} until none is left, then pip install it once"
            yield Result(f"duplicates.{name}", status, f"installed {len(places)} times: {listed}", fix)


def _module(component: Component) -> Iterator[Result]:
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
        yield Result(name, status, detail, f"no version check has seen these files: {_REMEDY}")
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
            fix = "rename it, or start from another directory: python -m and scripts import what lies beside them"
            yield Result(f"duplicates.{path.name}", "warning", detail, fix)


def _is_below(path: Path, folder: Path) -> bool:
    """Whether one lies in the other, as the paths are written (an installer may link packages) or as they resolve."""
    pairs = ((path.absolute(), folder.absolute()), (path.resolve(), folder.resolve()))
    return any(inner.is_relative_to(outer) for inner, outer in pairs)
