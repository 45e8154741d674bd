"""Validate ``platform.options`` against the platform's own model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import refuse
from anytron.config.options import model_diagnostics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

    from anytron.platform import Platform


def validated_options(platform: Platform, options: Mapping[str, Any]) -> BaseModel | None:
    """Make the platform's options from what the user wrote.

    Returns:
        An instance of ``platform.options_model``; None if the platform has no options.

    Raises:
        ConfigError: Unknown keys (with the nearest known names) or values of the wrong type, all at once.
    """
    model = platform.options_model
    refuse(model_diagnostics(model, options, "platform.options"))
    return None if model is None else model.model_validate(dict(options))
