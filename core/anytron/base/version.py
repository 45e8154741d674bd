"""The version of the installed distribution, which names the commit from which it was installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("anytron")
except PackageNotFoundError:  # its sources are on the path, and nobody has installed them
    __version__ = "0+not.installed"
