"""``anytron new-platform``: write the package of a new platform from a template, and print the next commands."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from anytron.base.errors import PluginError
from anytron.base.files import exhausted, publish_directory
from anytron.device.loading.choice import OFFICIAL_PLATFORMS
from anytron.device.loading.discovery import GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterator


_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PLACEHOLDER = "acme"
"""The platform's name in the template."""


@dataclass(frozen=True)
class Names:
    """The names of a new platform, as users, ``pip install`` and ``import`` write them.

    Attributes:
        platform: What users write in ``platform.name``: lower-case words with hyphens.
    """

    platform: str

    @property
    def distribution(self) -> str:
        """Name of the distribution, for ``pip install``."""
        return f"anytron-{self.platform}"

    @property
    def package(self) -> str:
        """Name of the package, for ``import``."""
        return f"anytron_{self.platform.replace('-', '_')}"

    def fill(self, text: str) -> str:
        """Put the name into text, or a path, of the template."""
        forms = {
            f"anytron_{_PLACEHOLDER}": self.package,
            _PLACEHOLDER.capitalize(): "".join(word.capitalize() for word in self.platform.split("-")),
            _PLACEHOLDER: self.platform,
        }
        return re.sub("|".join(forms), lambda found: forms[found.group()], text)


def names_of(platform: str) -> Names:
    """Check the name of a new platform.

    Raises:
        PluginError: ``platform`` is not a valid name, or an installed or official plugin has this name.
    """
    normal = re.sub(r"[-_.]+", "-", platform).strip("-").lower()
    if not _NAME.fullmatch(platform):
        raise PluginError(
            f"'{platform}' cannot be the name of a platform.",
            where="anytron new-platform",
            why="the name must consist of lower-case letters, digits and single hyphens, and begin with a letter: "
            "a distribution, an import package and a class are named after it",
            fix=f"run: anytron new-platform {normal}"
            if _NAME.fullmatch(normal)
            else "choose another name, for example: anytron new-platform acme",
        )
    names = Names(platform)
    if reason := _taken(names):
        ours = f"pip uninstall {names.distribution}, or " if names.distribution in reason else ""
        raise PluginError(
            f"A plugin named '{platform}' already exists.",
            where="anytron new-platform",
            why=reason,
            fix=f"{ours}choose another name; `anytron plugins list` shows the names in use",
        )
    return names


def _taken(names: Names) -> str:
    """Why the name cannot be used; empty if it can."""
    if names.platform in OFFICIAL_PLATFORMS:
        return f"it is a platform of this project: {OFFICIAL_PLATFORMS[names.platform]}"
    for group in GROUPS:
        for point in entry_points(group=group, name=names.platform):
            return f"the installed distribution {point.dist.name if point.dist else 'of ' + point.value} offers it"
    if importlib.util.find_spec(names.package) is not None:
        return f"an import package {names.package} is installed"
    return ""


TEMPLATE = Path(__file__).parent / "scaffold" / "template"
"""A complete package for a platform called ``acme``, of real files: its name is replaced in them."""


def write_package(names: Names, into: Path) -> Path:
    """Write ``into/anytron-NAME``: whole, or not at all.

    Returns:
        The directory.

    Raises:
        PluginError: The directory already exists, or cannot be created in ``into``.
    """
    directory = into / names.distribution
    if directory.exists() or directory.is_symlink():
        raise PluginError(
            f"{directory} already exists.",
            where="anytron new-platform",
            why="anytron new-platform does not overwrite files",
            fix="delete the directory, or choose another parent directory with --into DIR",
        )

    def write(part: Path) -> None:
        for source in template_files():
            file = part / names.fill(source.relative_to(TEMPLATE).as_posix())
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(names.fill(source.read_text(encoding="utf-8")), encoding="utf-8")

    try:
        publish_directory(directory, write)
    except OSError as error:
        raise exhausted(error) or PluginError(
            f"{directory} cannot be written.",
            where="anytron new-platform",
            why=f"{error.strerror}: {error.filename}",
            fix="choose another parent directory with --into DIR",
        ) from error
    return directory


def template_files() -> Iterator[Path]:
    """The files of the template, without bytecode caches."""
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def new_platform(name: str, into: Path) -> None:
    """Write the package and print the next commands."""
    names = names_of(name)
    directory = write_package(names, into)
    place = directory if directory.is_absolute() else f"./{directory}"  # without ./ pip would ask its index
    commands = {
        f"pip install --editable {shlex.quote(str(place))}": "",
        f"anytron conformance {name} --level device": "passes as it is: on the host's processor",
    }
    typer.echo(f"wrote {place}, the package of the platform '{name}'; next:\n")
    for command, remark in commands.items():
        typer.echo(f"  {command}" + (f"  # {remark}" if remark else ""))
    typer.echo(
        f"\nThen write probe() in {place}/{names.package}/platform.py, the device in runtime.py,"
        "\nand the hooks that platform.py lists at its end. anytron conformance says what is right and what is wrong."
    )
