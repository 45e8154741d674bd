"""Let the plugins adapt a configuration that is about one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.config.schema import RunConfig
    from anytron.hooks.facade import Hooks


class NotPossible(Exception):  # noqa: N818 - what happened
    """The plugins refuse the configuration, or change what it is about; the message says who and why."""


def adapted(wanted: RunConfig, hooks: Hooks, key: str, value: Callable[[RunConfig], object]) -> RunConfig:
    """Apply the plugins' edits.

    Args:
        wanted: The configuration.
        hooks: Of the active platform.
        key: What the configuration is about: a key, or a section; empty = several.
        value: What of it must stay as it is.

    Raises:
        NotPossible: A plugin finds an error, or edits change the value.
    """
    try:
        config, edits, _ = hooks.configure(wanted)
    except ConfigError as error:
        raise NotPossible(error.why or error.what) from error
    if value(config) != value(wanted):
        concerned = [(plugin, edit) for plugin, edit in edits if not key or f"{edit.key}.".startswith(f"{key}.")]
        raise NotPossible(
            "; ".join(f"{plugin} sets {edit.key} to {edit.value!r}: {edit.reason}" for plugin, edit in concerned)
        )
    return config
