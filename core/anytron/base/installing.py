"""How the same Anytron gets into another environment."""

from __future__ import annotations


def installable(version: str) -> str:
    """Say what ``pip install`` takes to install a version of Anytron.

    Args:
        version: ``anytron.__version__``. No package index has the version of a commit, ``0.1.dev12+g0123abcde``.
    """
    if ".dev" not in version:
        return f"anytron=={version}"
    commit = version.partition("+g")[2].partition(".")[0]
    state = f"at commit {commit}" if commit else "as the driver has them"
    return f"CLONE, where CLONE is Anytron's sources {state}"
