"""Choose the modules of which models are built, Transformer Engine's or the portable ones, and try imports."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from anytron import ConfigError, Decision, PlatformError

if TYPE_CHECKING:
    from anytron_cuda.options import Modules


PORTABLE, TRANSFORMER_ENGINE = "portable", "transformer_engine"

OPTION = "platform.options.modules"

DISTRIBUTION, PACKAGE = "transformer-engine", "transformer_engine.pytorch"

SUPPORTED = ">=2.0,<3"
"""Versions of Transformer Engine. Megatron-Core 0.16.1 asks for each feature's own version, and its extra ``dev`` is
resolved with 2.9 to 2.11."""

INSTALL = "pip install --no-build-isolation 'anytron[cuda,te]'"
REBUILD = "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall transformer-engine-torch=="
"""The part of Transformer Engine that is built for the installed torch; pip would leave an installed one as it is."""

IMPORT_S = 300.0
"""Seconds that an import may take, from a slow disk."""

_IMPORT = "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[2]); importlib.import_module(sys.argv[1])"


@dataclass(frozen=True)
class Library:
    """Transformer Engine on this machine.

    Attributes:
        version: Installed version; None = not installed.
        broken: The message of its import, if it was tried and failed.
    """

    version: Version | None = None
    broken: str = ""

    @property
    def obstacle(self) -> str:
        """Why models cannot be built with Transformer Engine; empty if they can."""
        if self.version is None:
            return "Transformer Engine is not installed"
        if not self._supported:
            return f"Transformer Engine {self.version} is installed, but only {SUPPORTED} is supported"
        if self.broken:
            return f"Transformer Engine {self.version} is installed and cannot be imported: {self.broken}"
        return ""

    @property
    def remedy(self) -> str:
        """How to get a Transformer Engine that can be used."""
        if self._supported and self.broken:
            return f"rebuild it for the installed torch: {REBUILD}{self.version}"
        return f"build it for the installed torch: {INSTALL}"

    @property
    def _supported(self) -> bool:
        return self.version is not None and SpecifierSet(SUPPORTED).contains(self.version, prereleases=True)


def choose_modules(wanted: Modules, library: Library, *, against: str = "") -> Decision:
    """Choose the modules of which models are built.

    Args:
        wanted: ``platform.options.modules``.
        library: The installed Transformer Engine.
        against: Why the run needs the portable modules; empty if it does not.

    Raises:
        ConfigError: Transformer Engine is selected but cannot be used.
    """
    if wanted == PORTABLE:
        return Decision("modules", PORTABLE, f"set by {OPTION}")
    if wanted == "auto" and against:
        return Decision("modules", PORTABLE, against)
    obstacle = library.obstacle
    if wanted == TRANSFORMER_ENGINE and obstacle:
        raise ConfigError(
            "Transformer Engine cannot be used.",
            where=f"{OPTION}={wanted}",
            why=obstacle,
            fix=f"{library.remedy}; or set {OPTION}={PORTABLE}",
        )
    if obstacle:
        return Decision("modules", PORTABLE, obstacle)
    asked = f"set by {OPTION}; " if wanted == TRANSFORMER_ENGINE else ""
    return Decision("modules", TRANSFORMER_ENGINE, f"{asked}version {library.version} is installed")


def transformer_engine(*, imported: bool) -> Library:
    """Look for Transformer Engine.

    Args:
        imported: Whether to check, in another process, that it can be imported, which takes seconds. This fails if it
            was built for another torch or another CUDA.
    """
    try:
        found = Library(Version(version(DISTRIBUTION)))
    except PackageNotFoundError:
        return Library()
    return Library(found.version, import_error(PACKAGE)) if imported and not found.obstacle else found


def import_transformer_engine() -> None:
    """Import Transformer Engine into a training rank. Otherwise Megatron would silently use other modules.

    Raises:
        PlatformError: Transformer Engine cannot be imported here, although it could on the driver's machine.
    """
    try:
        importlib.import_module(PACKAGE)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # Undefined symbols are ImportErrors or OSErrors; Transformer Engine checks what it finds with RuntimeErrors.
        here = replace(transformer_engine(imported=False), broken=str(error))
        raise PlatformError(
            "Transformer Engine cannot be imported.",
            where="platform cuda",
            why=f"{type(error).__name__}: {error}",
            fix=f"{here.remedy}; or set {OPTION}={PORTABLE}",
        ) from error


@functools.cache
def import_error(module: str) -> str:
    """Return why a module cannot be imported, by an import in another process; empty if the import works.

    A library that was built for another torch or another CUDA fails with missing symbols. A module that this process
    has already imported is not tried.
    """
    if module in sys.modules:
        return ""
    command = [sys.executable, "-c", _IMPORT, module, json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"the import takes more than {IMPORT_S:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"Python ended with status {done.returncode}"])[-1]
