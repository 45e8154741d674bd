"""The recipes for published models, and what their headers say: settings for other devices, and the memory planned."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from anytron.config.load import load_config
from tests.house import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig

FOLDER = ROOT / "examples" / "recipes"
_DEVICES = re.compile(r"# (\d+) ([GN]PUs) of (\d+) GB: (\d+\.\d\d) GiB")
_SETTINGS = "#   "


class Recipe(NamedTuple):
    """One of a file's settings.

    Attributes:
        name: The file's, without suffix.
        devices: How many there are.
        kind: ``GPUs`` or ``NPUs``.
        memory: Of each, in GiB.
        planned: What the header says is needed of it, in GiB.
        settings: What is to be added to the file for these devices.
    """

    name: str
    devices: int
    kind: str
    memory: int
    planned: str
    settings: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}-{self.devices}-{self.kind}"

    def run(self) -> RunConfig:
        """The configuration with these settings."""
        return load_config(FOLDER / f"{self.name}.yaml", self.settings)


def recipes(kind: str = "") -> list[Recipe]:
    """Read the headers of all files, and give the settings for one kind of devices, or for both."""
    return [recipe for recipe in _all() if kind in ("", recipe.kind)]


def _all() -> Iterator[Recipe]:
    for file in sorted(FOLDER.glob("*.yaml")):
        lines = iter(file.read_text(encoding="utf-8").splitlines())
        for line in lines:
            found = _DEVICES.fullmatch(line)
            if found is None:
                continue
            settings: list[str] = []
            while (line := next(lines)).startswith(_SETTINGS):
                settings += line.removeprefix(_SETTINGS).split()
            yield Recipe(file.stem, int(found[1]), found[2], int(found[3]), found[4], tuple(settings))
