"""Tell whether an installed version has the fault that a patch fixes."""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


def installed_version(package: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def in_range(version: str, specifier: str) -> bool:
    """Tell whether ``version`` lies in the PEP 440 range ``specifier``.

    A pre-release counts as the version that it leads to: ``0.16.2rc1`` is code of 0.16.2, so it lies
    in ``>=0.16.2`` and outside of ``<0.16.2``. PEP 440 puts it in neither, so that a patch for
    ``<0.16.2`` and its successor for ``>=0.16.2`` would both be skipped. A range that names a
    pre-release (``<0.16.2rc2``) is compared exactly. Local labels (``+cu128``) never count.

    Raises:
        packaging.specifiers.InvalidSpecifier: ``specifier`` is not a PEP 440 range.
        packaging.version.InvalidVersion: ``version`` is not a PEP 440 version.
    """
    found = Version(version)
    wanted = SpecifierSet(specifier)
    exact = any(_names_prerelease(clause.version) for clause in wanted)
    comparable = found.base_version if found.is_prerelease and not exact else found.public
    return wanted.contains(comparable, prereleases=True)


def _names_prerelease(clause_version: str) -> bool:
    try:
        return Version(clause_version).is_prerelease
    except InvalidVersion:  # `==1.2.*` is a legal clause and not a version
        return False
