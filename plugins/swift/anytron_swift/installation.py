"""Find the installed ms-swift, and import it, with a clear error if that fails."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from anytron import PluginError, Requirement
from anytron.train import examine_requirements

MS_SWIFT = Requirement("ms-swift", ">=4.6,<4.7", "pip install --no-deps ms-swift==4.6.0")
"""Releases of ms-swift that this plugin was tested with."""


def require_supported() -> None:
    """Check ms-swift's metadata, without importing it.

    Raises:
        PluginError: ms-swift is not installed, or its release is not tested with this plugin.
    """
    (found,) = examine_requirements([("swift", MS_SWIFT)])
    if not found.fits:
        raise PluginError(
            "No supported version of ms-swift is installed.",
            where=", ".join(found.locations) or sys.prefix,
            why=found.reason,
            fix=found.remedy,
        )


def load(module: str, name: str) -> Any:
    """Import an attribute of ms-swift, most of whose packages import their parts only on access.

    Raises:
        PluginError: A package that ms-swift needs is missing; ``pip install --no-deps`` installs no dependencies.
    """
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise PluginError(
            "A package that ms-swift imports is not installed.",
            where=sys.prefix,
            why=str(error),
            fix="install it, with --no-deps if it would replace other packages; constraints/swift.txt in Anytron's "
            "sources lists the versions that its tests use",
        ) from error
