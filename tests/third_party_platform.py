"""The complete platform of examples/third_party_platform, findable as an installed distribution is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.house import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = ROOT / "examples" / "third_party_platform"
USABLE = {"BASALT_DEVICES": "8"}
"""Environment variables with which its probe finds devices."""

_DISTRIBUTIONS = {
    ("anytron_basalt", "0.1.0"): "[anytron.platforms]\nbasalt = anytron_basalt:BasaltPlatform\n",
    ("basalt_sdk", "1.2.0"): "",
}


def install_into(folder: Path) -> list[str]:
    """Write the metadata of its two distributions into a folder.

    Returns:
        What has to be on sys.path, or in PYTHONPATH: the folder and the sources.
    """
    for (name, version), points in _DISTRIBUTIONS.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(points)
    return [str(folder), str(SAMPLE), str(SAMPLE / "sdk")]
