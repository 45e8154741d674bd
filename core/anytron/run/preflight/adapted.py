"""Let the plugins adapt a configuration that is about one key, within the limits of the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.config.diagnostics import refuse
from anytron.run.preflight.limits import limit_diagnostics

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session


class NotPossible(Exception):  # noqa: N818 - what happened
    """The platform or a plugin refuses it, or edits change what it is about; the message says who and why."""


def adapted(wanted: RunConfig, session: Session, key: str, value: Callable[[RunConfig], object]) -> RunConfig:
    """Apply the plugins' edits.

    Args:
        wanted: The configuration.
        session: The plugins and the active platform.
        key: What the configuration is about: a key, or a section; empty = several.
        value: What of it must stay as it is.

    Raises:
        NotPossible: A plugin finds an error, edits change the value, or the platform declares not to do what is asked.
    """
    try:
        config, edits, _ = session.hooks.configure(wanted)
        refuse(limit_diagnostics(config, session.platform))
    except ConfigError as error:
        raise NotPossible(error.why or error.what) from error
    if value(config) != value(wanted):
        concerned = [(plugin, edit) for plugin, edit in edits if not key or f"{edit.key}.".startswith(f"{key}.")]
        raise NotPossible(
            "; ".join(f"{plugin} sets {edit.key} to {edit.value!r}: {edit.reason}" for plugin, edit in concerned)
        )
    return config
