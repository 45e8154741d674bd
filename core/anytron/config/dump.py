"""Write a configuration as YAML that is read back as it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig


def to_yaml(config: RunConfig) -> str:
    """Give the whole configuration as YAML, in the schema's order."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


_INTERPOLATION = re.compile(r"(\\*)\$\{")


class _Dumper(yaml.SafeDumper):
    """Writes strings so that OmegaConf reads them as they are.

    It reads some as numbers that PyYAML, which writes YAML 1.1, does not: ``0E0``. And it would resolve ``${...}``, so
    that the configuration in a checkpoint became something else after it was checked.
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
