"""The complete platform of examples/third_party_platform, findable as an installed distribution is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.house import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = ROOT / "examples" / "third_party_platform"
USABLE = {"BASALT_DEVICES": "8"}
"""Environment variables with which its probe finds devices."""


def install_into(folder: Path) -> list[str]:
    """Write the metadata of the platform and of its library into a folder.

    Returns:
        What has to be on sys.path, or in PYTHONPATH: the folder and the sources.
    """
    describe(folder, "anytron-basalt", "0.1.0", "[anytron.platforms]\nbasalt = anytron_basalt:BasaltPlatform\n")
    return [*install_sdk(folder), str(SAMPLE)]


def install_sdk(folder: Path) -> list[str]:
    """The same for its library alone."""
    describe(folder, "basalt-sdk", "1.2.0", "")
    return [str(folder), str(SAMPLE / "sdk")]


def describe(folder: Path, name: str, version: str, points: str) -> None:
    """Write the metadata of a distribution with these entry points."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)
