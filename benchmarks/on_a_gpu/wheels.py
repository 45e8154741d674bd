"""Carried wheels: what they hold, how they divide into pieces, and which of them a Python installation lacks."""

from __future__ import annotations

import email
import hashlib
import importlib
import re
import sys
import zipfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
PIECE_BYTES = 55_500_000
"""Of a piece, at most: channels take 64 MiB at a time, and the source tree (11 MB) travels beside it."""
OWN = ("anytron", "anytron-conformance", "anytron-cuda")
"""Distributions of this tree, carried as wheels for the sake of their metadata and entry points."""
SOURCES = ("core", "backends", "plugins/accelerator", "plugins/cpu", "plugins/cuda")
"""Where their packages lie in the tree."""
TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""Distributions that are the image's, always."""


@dataclass(frozen=True)
class Distribution:
    """An installed or a carried distribution.

    Attributes:
        name: Normalised: lower case, dashes.
        version: As it says.
        requires: Its requirements, one line each.
        wheel: The file; None if it is the image's.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    wheel: Path | None = None


@dataclass(frozen=True)
class Plan:
    """Where each distribution that a run needs comes from.

    Attributes:
        chosen: By name.
        lacking: Requirements that neither the image nor a wheel meets, each with who has it.
    """

    chosen: Mapping[str, Distribution]
    lacking: tuple[str, ...]

    @property
    def wheels(self) -> list[Path]:
        """The wheels to install."""
        return sorted(one.wheel for one in self.chosen.values() if one.wheel is not None)


def normalised(name: str) -> str:
    """Write a distribution's name as PEP 503 does."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(wheel: Path) -> Distribution:
    """Read a wheel's metadata."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        text = email.message_from_bytes(files.read(name))
    return Distribution(normalised(text["Name"]), text["Version"], tuple(text.get_all("Requires-Dist", ())), wheel)


def carried(folder: Path) -> dict[str, Distribution]:
    """Read all wheels below a folder, by name. One version of each: a second one is an error."""
    found: dict[str, Distribution] = {}
    for wheel in sorted(folder.rglob("*.whl")):
        one = read(wheel)
        if one.name in found:
            sys.exit(f"There are two wheels of {one.name}: {found[one.name].wheel} and {wheel}. Remove one.")
        found[one.name] = one
    return found


def digest(path: Path) -> str:
    """The file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pieces(sizes: Sequence[int], limit: int = PIECE_BYTES) -> list[list[int]]:
    """Divide wheels, by their sizes in bytes, into pieces: each goes into the first that has room for it.

    Returns:
        For each piece the indices of its wheels.
    """
    filled: list[list[int]] = []
    for index, size in enumerate(sizes):
        if size > limit:
            raise ValueError(f"a wheel of {size} bytes is larger than a piece, {limit} bytes")
        room = (piece for piece in filled if sum(sizes[other] for other in piece) + size <= limit)
        piece = next(room, None)
        if piece is None:
            filled.append(piece := [])
        piece.append(index)
    return filled


def use_packaging(pip: Path) -> None:
    """Make ``pip._vendor.packaging`` importable, of the wheel of pip: the image may have neither."""
    sys.path.insert(0, str(pip))


def plan(
    roots: Iterable[str],
    wheels: Mapping[str, Distribution],
    installed: Callable[[str], Distribution | None],
) -> Plan:
    """Decide what to install: as little as possible of what the image has, and nothing of torch's.

    A carried wheel is taken where the image lacks a distribution or has a version that does not fit, where an image's
    one asks for what another wheel is too new for, and for our own. What the image's distributions lack beyond that,
    it has always lacked.

    Args:
        roots: Requirements of the run.
        wheels: The carried ones, by name.
        installed: Finds one of the image's, by name.
    """
    from_wheel = set(OWN)
    while True:
        chosen, lacking, more = _walk(roots, wheels, installed, from_wheel)
        if more <= from_wheel:
            return Plan(chosen, tuple(lacking))
        from_wheel |= more


def plan_with(
    roots: Sequence[str],
    optional: Sequence[str],
    wheels: Mapping[str, Distribution],
    installed: Callable[[str], Distribution | None],
) -> tuple[Plan, dict[str, list[str]]]:
    """Plan as :func:`plan` does, with those optional roots that can be used; return what each of the others lacks."""
    found = plan(roots, wheels, installed)
    left_out: dict[str, list[str]] = {}
    for name in optional:
        larger = plan([*roots, name], wheels, installed)
        lacking = [line for line in larger.lacking if line not in found.lacking]
        if lacking:
            left_out[name] = lacking
        else:
            roots, found = [*roots, name], larger
    return found, left_out


def _walk(
    roots: Iterable[str],
    wheels: Mapping[str, Distribution],
    installed: Callable[[str], Distribution | None],
    from_wheel: set[str],
) -> tuple[dict[str, Distribution], list[str], set[str]]:
    """Follow requirements; return what meets them, what nothing meets, and what must come from a wheel besides."""
    packaging = importlib.import_module("pip._vendor.packaging.requirements")
    chosen: dict[str, Distribution] = {}
    lacking: dict[str, None] = {}
    more: set[str] = set()
    seen: set[tuple[str, str]] = set()
    run = Distribution("this run", "")
    queue = deque((packaging.Requirement(line), run) for line in roots)
    while queue:
        needed, parent = queue.popleft()
        name = normalised(needed.name)
        own_business = parent.wheel is None and parent is not run
        here, wheel = installed(name), wheels.get(name)
        one = wheel if name in from_wheel and wheel is not None else here
        if one is None and wheel is not None:
            more.add(name)
            one = wheel
        if one is None:
            if not own_business:
                lacking[f"{needed} (needed by {parent.name})"] = None
            continue
        if not needed.specifier.contains(one.version, prereleases=True):
            if one is here and wheel is not None and needed.specifier.contains(wheel.version, prereleases=True):
                more.add(name)
            elif one is wheel and own_business and parent.name in wheels:
                more.add(parent.name)
            elif not own_business:
                lacking[f"{needed} (needed by {parent.name}); {one.version} is there"] = None
        chosen[name] = one
        if TORCH.fullmatch(name):
            continue
        for extra in ["", *needed.extras]:
            if (name, extra) not in seen:
                seen.add((name, extra))
                queue.extend((line, one) for line in _active(one, extra, packaging.Requirement))
    return chosen, list(lacking), more


def _active(one: Distribution, extra: str, parse: Callable[[str], object]) -> Iterator[object]:
    """Requirements of a distribution that hold in this Python, with an extra."""
    for line in one.requires:
        needed = parse(line)
        if needed.marker is None or needed.marker.evaluate({"extra": extra}):  # type: ignore[attr-defined]
            yield needed


def stale(wheels: Mapping[str, Distribution], tree: Path = ROOT) -> list[str]:
    """Files in which our wheels differ from the tree: whoever measures would measure another state."""
    packed: dict[str, bytes] = {}
    for name in OWN:
        if name in wheels:
            with zipfile.ZipFile(wheels[name].wheel or "") as files:
                packed |= {file: files.read(file) for file in files.namelist() if file.endswith(".py")}
    there = {
        str(path.relative_to(source)): path.read_bytes()
        for source in map(tree.joinpath, SOURCES)
        for package in source.glob("anytron*")
        for path in package.rglob("*.py")
    }
    return sorted(name for name in packed.keys() | there.keys() if packed.get(name) != there.get(name))
