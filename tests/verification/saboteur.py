"""Extensions that break something, for commands that are run in processes of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def with_saboteur(folder: Path, source: str, group: str = "plugins") -> dict[str, str]:
    """Write an extension, the source of a class ``Sabotage``; return the environment in which it is installed.

    With ``group="platforms"`` it is a platform.
    """
    (folder / "sabotage.py").write_text(source)
    metadata = folder / "sabotage-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sabotage\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[anytron.{group}]\nsabotage = sabotage:Sabotage\n")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}
