"""Tell which parts of a configuration nobody else should read."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?:^|_)(?:key|password|passwd|secret|token|credentials?)$", re.IGNORECASE)
_USER = re.compile(r"(://)[^/\s@]+@")


def is_secret(name: str) -> bool:
    """Whether a key is named like a secret: ``api_key``, ``token``, ``password``."""
    return _SECRET.search(name) is not None


def without_user(text: str) -> str:
    """Take users and passwords out of the addresses in a text."""
    return _USER.sub(r"\1", text)


def without_secrets(value: Any, name: str = "") -> Any:
    """Copy JSON values without their secrets, and without users and passwords in addresses.

    Args:
        value: Any of them.
        name: The key that it stands at.
    """
    if isinstance(value, dict) and value:
        return {key: without_secrets(part, str(key)) for key, part in value.items()}
    if isinstance(value, list) and value:
        return [without_secrets(part) for part in value]
    if value is not None and is_secret(name):
        return HIDDEN
    return without_user(value) if isinstance(value, str) else value
