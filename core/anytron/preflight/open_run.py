"""What ``train`` and ``config show`` have in common: from a path to a configuration that plugins have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.config.load import load_config
from anytron.plugins import Session, check_requirements, open_session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig


@dataclass(frozen=True)
class Prepared:
    """A configuration, and the plugins that it will run with.

    Attributes:
        config: Overrides and the plugins' edits applied.
        session: The plugins and the active platform.
        platform_line: Which platform was chosen, and why.
        remarks: Edits of plugins with their reasons, warnings, optional packages that are missing,
            packages of other devices that are hidden.
    """

    config: RunConfig
    session: Session
    platform_line: str
    remarks: list[str]


def prepare_run(path: Path, overrides: Sequence[str]) -> Prepared:
    """Read the configuration, choose the platform, and let the plugins check and adapt the configuration.

    Raises:
        ConfigError: The configuration is not valid, or a plugin refuses it.
        PlatformError: No platform can be used, or not the one asked for.
        PluginError: A plugin is broken, or what it needs is not installed.
    """
    config = load_config(path, overrides)
    session = open_session(platform=config.platform.name, options=config.platform.options)
    unmet = check_requirements(session.hooks, config.engine.name)
    remarks = [f"optional: {one.reason} - {one.remedy}" for one in unmet]
    if session.hidden:
        remarks.append(f"hidden, because it belongs to another device: {', '.join(session.hidden)}")
    config, edits, diagnostics = session.hooks.configure(config)
    remarks += [f"{plugin} sets {edit.key} to {edit.value!r}: {edit.reason}" for plugin, edit in edits]
    for plugin, remark in diagnostics:
        fix = f" - {remark.fix}" if remark.fix else ""
        remarks.append(f"{remark.severity} of {plugin}: {remark.key}: {remark.message}{fix}")
    config = _with_rollout_options(config, session)
    line = f"platform: {session.platform.name} ({session.choice_reason})"
    return Prepared(config, session, line, remarks)


def _with_rollout_options(config: RunConfig, session: Session) -> RunConfig:
    """Add what the plugins want of the rollout engine; what the user set wins."""
    options = {**session.hooks.rollout_options(config.rollout.engine), **config.rollout.options}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"options": options})})
