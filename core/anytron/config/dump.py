"""Write a configuration as YAML that is read back as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig


def to_yaml(config: RunConfig) -> str:
    """Give the whole configuration as YAML, in the schema's order."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that OmegaConf reads as numbers: YAML 1.1, which PyYAML writes, wants a point in ``0E0``."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
    except ValueError:
        style = None
    else:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
