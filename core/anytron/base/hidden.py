"""Packages that :mod:`anytron.device.loading.hiding` hides: how to recognise them, and what an import of one means."""

from __future__ import annotations

import sys


def is_hidden(name: str) -> bool:
    """Whether Python's import system treats a package as not installed: None in ``sys.modules``."""
    return name in sys.modules and sys.modules[name] is None


def error_text(error: BaseException) -> str:
    """Return the type and the text of an error; for an import of a hidden package, also why it is hidden."""
    text = f"{type(error).__name__}: {error}"
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not package or not is_hidden(package):
        return text
    why = f"{package} is hidden in this process, because the active platform does not list it"
    line = f'device_packages = ("{package}",)'
    return f"{text} ({why}. If the platform needs this package, add to the platform's class: {line})"
