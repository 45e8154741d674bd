"""Whether the packages of the server are installed."""

from __future__ import annotations

from importlib.util import find_spec

from anytron.base.errors import ConfigError


def check_installed(where: str) -> None:
    """Check that the packages of the extra ``serve`` are installed.

    Args:
        where: The command or the configuration key that needs them.

    Raises:
        ConfigError: A package is missing.
    """
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            "The packages of the server are not installed.",
            where=where,
            why=f"not installed: {', '.join(missing)}",
            fix="install them: pip install 'anytron[serve]'",
        )
