"""Validate ``platform.options`` against the platform's own model.

A process without a configuration, such as one of another framework's, is given them by a variable. A run's
configuration and the variable must agree: neither wins silently, because both were written by somebody.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.config.diagnostics import refuse
from anytron.config.json_files import parse_object
from anytron.config.options import model_diagnostics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

    from anytron.device.platform import Platform

VARIABLE = "ANYTRON_PLATFORM_OPTIONS"
KEY = "platform.options"


def validated_options(platform: Platform, options: Mapping[str, Any], *, settled: bool = False) -> BaseModel | None:
    """Make the platform's options from what the user wrote, here or in :data:`VARIABLE`.

    Args:
        platform: Whose they are.
        options: ``platform.options``; empty leaves them to the variable.
        settled: They are a run's, with the edits of its plugins: the user's were compared with the variable before.

    Returns:
        An instance of ``platform.options_model``; None if the platform has no options.

    Raises:
        ConfigError: Unknown keys (with the nearest known names) or values of the wrong type, all at once; or the
            variable holds no JSON object, or another than ``options``.
    """
    said = {} if settled and options else options_of_variable()
    if said and options and said != options:
        raise ConfigError(
            "The platform's options are given twice, and differ.",
            where=f"{KEY}, {VARIABLE}",
            why="the one would silently overrule the other",
            fix=f"unset {VARIABLE}, or leave {KEY} out",
        )
    model, given = platform.options_model, dict(options or said)
    refuse(model_diagnostics(model, given, VARIABLE if said and not options else KEY))
    return None if model is None else model.model_validate(given)


def options_of_variable() -> dict[str, Any]:
    """Read :data:`VARIABLE`; empty if it is not set.

    Raises:
        ConfigError: It holds no JSON object.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        return parse_object(text) if text else {}
    except ValueError as error:
        raise _malformed(str(error)) from error


def _malformed(why: str) -> ConfigError:
    fix = f"""for example {VARIABLE}='{{"adaptor": "mindspeed"}}'"""
    return ConfigError(f"{VARIABLE} is no JSON object.", where="environment variables", why=why, fix=fix)
