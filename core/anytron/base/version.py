"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("anytron")
    except PackageNotFoundError:  # its sources are on the path, and nobody has installed them
        return "0+not.installed"


__version__ = _installed()
"""Version of the installed distribution; between releases it names the commit from which it was installed."""
