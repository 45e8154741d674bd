"""Files of the tests of Anytron, by their path: verl's wheel has a package ``tests``, which hides ours."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[3]


def load(*path: str) -> ModuleType:
    """Load the file ``tests/PATH``."""
    file = ROOT.joinpath("tests", *path)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
