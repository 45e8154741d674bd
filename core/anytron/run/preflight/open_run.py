"""Open a run: read a YAML file and overrides, choose plugins, apply their edits, and collect diagnostics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.config.load import read_config, read_stages
from anytron.config.options import engine_option_diagnostics
from anytron.device.hooks.edits import apply_edits
from anytron.device.hooks.types import ConfigEdit
from anytron.device.loading import Session, check_requirements, open_session
from anytron.device.loading.session import options_of_variable
from anytron.device.platform import decisions_of
from anytron.record.sinks.delivery import sink_diagnostics
from anytron.run.preflight.capabilities import platform_diagnostics, rollout_diagnostics, training_diagnostics
from anytron.run.preflight.files import output_diagnostics, reference_diagnostics
from anytron.run.preflight.limits import limit_diagnostics
from anytron.run.preflight.machine import machine_diagnostics
from anytron.run.preflight.settings import reward_diagnostics, setting_diagnostics, supervised_diagnostics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from anytron.config.load import Places
    from anytron.config.schema import RunConfig


@dataclass(frozen=True)
class OpenRun:
    """A configuration, the plugins that it will run with, and what was found wrong.

    Attributes:
        config: The configuration, with overrides and the plugins' edits applied.
        session: The plugins and the active platform.
        remarks: Lines for the user: the platform and why it was chosen; the platform's decisions; optional packages
            that are missing, packages of other devices that are hidden, edits of plugins with their reasons.
        diagnostics: Problems that the plugins and the checks of this machine found, each with its place;
            :func:`anytron.config.diagnostics.refuse` raises the errors among them, all at once.
    """

    config: RunConfig
    session: Session
    remarks: list[str]
    diagnostics: list[Diagnostic]

    @property
    def lines(self) -> list[str]:
        """Remarks and warnings, as they are shown; the platform first."""
        return [*self.remarks, *(f"warning: {one}" for one in self.diagnostics if one.severity == "warning")]


def open_run(
    path: Path,
    overrides: Sequence[str],
    relative_to: Path | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> OpenRun:
    """Read the configuration, choose the platform, let the plugins adapt the configuration, and check all of it.

    Takes the arguments of :func:`~anytron.config.load.read_config`.

    Raises:
        ConfigError: The configuration is not valid in itself, or has several stages and none is chosen.
        PlatformError: No platform can be used, or the requested one cannot.
        PluginError: A plugin is broken, or what it needs is not installed.
    """
    config, places = read_config(path, overrides, relative_to, settings)
    return _opened(config, places, _session(config), path)


def open_stages(path: Path, overrides: Sequence[str]) -> dict[str, OpenRun]:
    """Open all stages of a configuration, with the same plugins and the same platform.

    Each stage is checked as if it started from the model that the file names. This model has the same sizes as the
    model that the stage will start from.

    Returns:
        The opened stages by name, in training order; a run without stages has the name "".

    Raises: As :func:`open_run`.
    """
    stages = read_stages(path, overrides)
    session = _session(next(iter(stages.values()))[0])
    opened = {name: _opened(config, places, session, path) for name, (config, places) in stages.items()}
    for run, (_, places) in list(zip(opened.values(), stages.values(), strict=True))[:-1]:
        if not run.config.trainer.save_hf:
            message = "this stage does not save its model, but the next stage starts from it"
            fix = "remove trainer.save_hf (default: true)"
            run.diagnostics.extend(places.locate([Diagnostic("error", "trainer.save_hf", message, fix)]))
    return opened


def _session(config: RunConfig) -> Session:
    return open_session(config.platform.name, config.platform.options, config.engine.name)


def _opened(config: RunConfig, places: Places, session: Session, path: Path) -> OpenRun:
    unmet = check_requirements(session.hooks, config.engine.name)
    useless = list(supervised_diagnostics(config))  # plugins set what they would for any run
    session.use_options(config.platform.options)  # a stage before may have edited its own
    config = _with_options_of_variable(config)  # edits are made on top of them
    edits, found = session.hooks.remarks(config)
    found += useless
    config = apply_edits(config, edits)
    session.use_options(config.platform.options, settled=True)
    remarks = [f"platform: {session.platform.name} ({session.choice_reason})"]
    remarks += [str(decision) for decision in decisions_of(session.platform)]
    remarks += [f"optional: {one.reason} - {one.remedy}" for one in unmet]
    if session.hidden:
        remarks.append(f"hidden, because it adds another device to torch: {', '.join(session.hidden)}")
    remarks += [f"{plugin} sets {edit.key} to {edit.value!r}: {edit.reason}" for plugin, edit in edits]
    places = replace(places, by_key={**places.by_key, **{edit.key: f"plugin '{plugin}'" for plugin, edit in edits}})
    found += setting_diagnostics(config)
    found += machine_diagnostics(config, session.platform, session.probe)
    found += reference_diagnostics(config)
    found += output_diagnostics(config, path)
    found += sink_diagnostics(config)
    found += engine_option_diagnostics(config)  # plugins may have set some
    found += reward_diagnostics(config)
    found += training_diagnostics(config)
    found += rollout_diagnostics(config)
    found += platform_diagnostics(config, session.platform)
    found += limit_diagnostics(config, session.platform)
    return OpenRun(config, session, remarks, places.locate(found))


def _with_options_of_variable(config: RunConfig) -> RunConfig:
    options = {} if config.platform.options else options_of_variable()
    return apply_edits(config, [("", ConfigEdit("platform.options", options, ""))]) if options else config
