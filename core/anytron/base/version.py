"""The version of the installed distribution, and how another environment gets the same one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("anytron")
    except PackageNotFoundError:  # its sources are on the path, and nobody has installed them
        return "0+not.installed"


__version__ = _installed()
"""Version of the installed distribution; between releases it names the commit from which it was installed."""


def installable(version: str) -> str:
    """Return the argument of ``pip install`` that installs a version of Anytron.

    Args:
        version: ``anytron.__version__``.

    Returns:
        ``anytron==VERSION``. For the version of a commit (``0.1.dev12+g0123abcde``), which no package index has, the
        phrase ``CLONE, where CLONE is Anytron's sources at commit ...``.
    """
    if ".dev" not in version:
        return f"anytron=={version}"
    commit = version.partition("+g")[2].partition(".")[0]
    state = f"at commit {commit}" if commit else "as the driver has them"
    return f"CLONE, where CLONE is Anytron's sources {state}"


ISSUES = "https://github.com/anytron/anytron/issues"
"""Where users report what they found."""
