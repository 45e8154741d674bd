"""Apply the configuration edits that plugins ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from anytron.base.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import ConfigEdit


def apply_edits(config: RunConfig, edits: Sequence[tuple[str, ConfigEdit]]) -> RunConfig:
    """Set the dotted keys of the edits, and validate the result like a configuration that was read from a file.

    Raises:
        ConfigError: A key does not exist, two plugins disagree, or the schema refuses a value.
    """
    _refuse_conflicts(edits)
    values = config.model_dump(exclude_unset=True)
    for plugin, edit in edits:
        _check_key(config, plugin, edit.key)
        target = values
        *sections, name = edit.key.split(".")
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = edit.value
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors()]
        raise ConfigError(
            "The configuration is not valid after the plugins' edits.",
            where=", ".join(f"{edit.key} (plugin '{plugin}')" for plugin, edit in edits),
            why="; ".join(mistakes),
            fix="correct the values that the plugins' hook configure returns",
        ) from error


def is_set(config: RunConfig, key: str) -> bool:
    """Whether the user has set a dotted key; True, too, if a value stands where the key would need a section."""
    node: Any = config
    for name in key.split("."):
        if isinstance(node, BaseModel):
            if name not in node.model_fields_set:
                return False
            node = getattr(node, name)
        elif isinstance(node, Mapping):
            if name not in node:
                return False
            node = node[name]
        else:
            break
    return True


def _refuse_conflicts(edits: Sequence[tuple[str, ConfigEdit]]) -> None:
    for index, (plugin, edit) in enumerate(edits):
        for other_plugin, other in edits[:index]:
            # A value and a key inside of it (``engine.options`` and ``engine.options.x``) would depend on order.
            nested = edit.key.startswith(f"{other.key}.") or other.key.startswith(f"{edit.key}.")
            if nested or (edit.key == other.key and edit.value != other.value):
                raise ConfigError(
                    f"Two plugins disagree on {edit.key}.",
                    where=f"hook configure of '{other_plugin}' and '{plugin}'",
                    why=f"'{other_plugin}' sets {other.key} to {other.value!r} ({other.reason}); "
                    f"'{plugin}' sets {edit.key} to {edit.value!r} ({edit.reason})",
                    fix=f"disable a plugin: ANYTRON_DISABLE_PLUGINS={plugin} or ANYTRON_DISABLE_PLUGINS={other_plugin}",
                )


def _check_key(config: BaseModel, plugin: str, key: str) -> None:
    node: Any = config
    walked: list[str] = []
    for name in key.split("."):
        if isinstance(node, dict):
            return  # free-form options: any key may be set
        fields = type(node).model_fields if isinstance(node, BaseModel) else {}
        if name not in fields:
            raise ConfigError(
                f"Plugin '{plugin}' edits a key that does not exist: {key}.",
                where=f"hook configure of '{plugin}'",
                why=f"there is no {name} in {'.'.join(walked) or 'the configuration'}",
                fix=did_you_mean(name, fields, "".join(f"{section}." for section in walked))
                or "correct the key in the plugin; docs/reference/config.md lists all keys",
            )
        node = getattr(node, name)
        walked.append(name)
    if isinstance(node, BaseModel):
        raise ConfigError(
            f"Plugin '{plugin}' replaces a whole section: {key}.",
            where=f"hook configure of '{plugin}'",
            why="an edit may set only a single value, so that each value has its own reason",
            fix=f"return one edit for each key below it: {key}.<name>",
        )
