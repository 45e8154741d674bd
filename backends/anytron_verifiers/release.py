"""The versions of verifiers that are supported, and how. Nothing here imports verifiers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from anytron.base.errors import ConfigError

TURNS = SpecifierSet(">=0.2.1,<0.4")
"""Versions whose environments take the model as a client object (``Environment.run_rollout(input, client, ...)``),
except versions that require an older ``datasets`` than training does; ``environment.path`` names the adapter."""
EPISODES = SpecifierSet(">=0.4,<0.5")
"""Versions whose environments run programs that reach the model over HTTP; ``environment.agent`` names the adapter."""

ADAPTERS = {
    TURNS: "environment.path: anytron_verifiers:VerifiersEnvironment",
    EPISODES: "environment.agent: anytron_verifiers:solve",
}


def installed(wanted: SpecifierSet) -> bool:
    """Whether the version of verifiers that is installed is one of these."""
    try:
        return wanted.contains(version("verifiers"), prereleases=True)
    except PackageNotFoundError:
        return False


def require(wanted: SpecifierSet) -> None:
    """Check which version of verifiers is installed, without importing it.

    Args:
        wanted: :data:`TURNS` or :data:`EPISODES`.

    Raises:
        ConfigError: verifiers is not installed, or its version is not one of these.
    """
    if installed(wanted):
        return
    what = "No supported version of verifiers is installed."
    fix = install = f"pip install 'verifiers{wanted}', with Python 3.11 or newer"
    try:
        why = f"verifiers {version('verifiers')} is installed, not {wanted}"
    except PackageNotFoundError:
        why = "verifiers is not installed"
    if other := next((one for one in ADAPTERS if one is not wanted and installed(one)), None):
        what = "The environment names the adapter of another version of verifiers."
        fix = f"replace '{ADAPTERS[wanted]}' by '{ADAPTERS[other]}'; or {install}"
    raise ConfigError(what, where=ADAPTERS[wanted], why=why, fix=fix)
