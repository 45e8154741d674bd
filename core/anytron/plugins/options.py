"""Validate ``platform.options`` against the platform's own model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from anytron.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

    from anytron.platform import Platform


def validated_options(platform: Platform, options: Mapping[str, Any]) -> BaseModel | None:
    """Make the platform's options from what the user wrote.

    Returns:
        An instance of ``platform.options_model``; None if the platform has no options.

    Raises:
        ConfigError: An unknown key (with the nearest known name) or a value of the wrong type.
    """
    model = platform.options_model
    known = list(model.model_fields) if model is not None else []
    for key in options:
        if key not in known:
            raise ConfigError(
                f"Unknown option of platform '{platform.name}': {key}.",
                where=f"platform.options.{key}",
                why=f"its options are {', '.join(known)}" if known else "it has no options",
                fix=did_you_mean(key, known) or "remove it",
            )
    if model is None:
        return None
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise ConfigError(
            f"Options of platform '{platform.name}' are not valid.",
            where=", ".join("platform.options." + ".".join(map(str, part["loc"])) for part in error.errors()),
            why="; ".join(part["msg"] for part in error.errors()),
        ) from error
