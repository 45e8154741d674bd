"""How the same Anytron gets into another environment."""

from __future__ import annotations


def install_command(python: str, version: str) -> str:
    """Say how an interpreter gets a version of Anytron.

    Args:
        python: The interpreter.
        version: ``anytron.__version__``. No package index has the version of a commit, ``0.1.dev12+g0123abcde``.
    """
    command = f"{python} -m pip install"
    if ".dev" not in version:
        return f"{command} anytron=={version}"
    commit = version.partition("+g")[2].partition(".")[0]
    state = f"at commit {commit}" if commit else "as the driver has them"
    return f"{command} CLONE, where CLONE is Anytron's sources {state}"
