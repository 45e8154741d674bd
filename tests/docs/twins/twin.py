"""What a twin is, and how it is tried."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.house import ROOT


class Twin(NamedTuple):
    """A sabotage.

    Attributes:
        test: Which must fail with it, as SECURITY.md names it.
        file: Of the repository, in a package.
        whole: What stands there, once.
        broken: What stands there in the twin.
    """

    test: str
    file: str
    whole: str
    broken: str


def broken(twin: Twin, folder: Path) -> None:
    """Write a copy of the package that lacks what the twin takes away."""
    file = ROOT / twin.file
    package = file.parent
    while (package.parent / "__init__.py").exists():
        package = package.parent
    copy = shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    text = file.read_text("utf-8")
    (copy / file.relative_to(package)).write_text(text.replace(twin.whole, twin.broken), "utf-8")


def notices(twin: Twin) -> bool:
    """Whether the test fails with the twin."""
    with tempfile.TemporaryDirectory(prefix="anytron-twin-") as folder:
        broken(twin, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow", twin.test],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    return done.returncode == 1
