"""Write a configuration as YAML from which the same configuration is read, and remove secrets from JSON values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML, in the schema's order."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


_INTERPOLATION = re.compile(r"(\\*)\$\{")


class _Dumper(yaml.SafeDumper):
    """Writes strings so that OmegaConf reads them back unchanged.

    OmegaConf reads some strings as numbers that PyYAML, which writes YAML 1.1, does not: ``0E0``. It would also resolve
    ``${...}``, so that a configuration would change after it was checked.
    """


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
    except ValueError:
        style = None
    else:
        style = "'"
    text = _INTERPOLATION.sub(r"\1\1\\${", text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


HIDDEN = "(hidden)"
_SECRET = re.compile(r"(?:^|_)(?:key|password|passwd|secret|token|credentials?)$", re.IGNORECASE)
_USER = re.compile(r"(://)[^/\s@]+@")


def is_secret(name: str) -> bool:
    """Whether a key is named like a secret: ``api_key``, ``token``, ``password``."""
    return _SECRET.search(name) is not None


def without_user(text: str) -> str:
    """Remove users and passwords from the URLs in a text."""
    return _USER.sub(r"\1", text)


def without_secrets(value: Any, name: str = "") -> Any:
    """Copy a JSON value; secrets become ``(hidden)``, and users and passwords in URLs are removed.

    Args:
        value: Any JSON value.
        name: The key of the value, which tells whether it is a secret (:func:`is_secret`); empty = it has no key.
    """
    if isinstance(value, dict) and value:
        return {key: without_secrets(part, str(key)) for key, part in value.items()}
    if isinstance(value, list) and value:
        return [without_secrets(part) for part in value]
    if value is not None and is_secret(name):
        return HIDDEN
    return without_user(value) if isinstance(value, str) else value
