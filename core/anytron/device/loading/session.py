"""Open a session: all plugins loaded, one platform active, the hooks ready to be called."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, PlatformError, PluginError
from anytron.config.diagnostics import refuse
from anytron.config.json_files import parse_object
from anytron.config.options import model_diagnostics
from anytron.device.hooks.facade import Hooks
from anytron.device.hooks.registry import Member, Precedence, read_member
from anytron.device.loading.choice import Choice, asked_platform, choose_platform, probe_platforms, settled_reports
from anytron.device.loading.discovery import DISABLE, Found, find_plugins
from anytron.device.loading.hiding import hide_foreign_devices
from anytron.device.loading.neutral import NeutralDefaults
from anytron.device.loading.report import PluginReport, State, examine_requirements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel

    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import ProcessInfo
    from anytron.device.platform import Platform, Probe

OPTIONS_VARIABLE = "ANYTRON_PLATFORM_OPTIONS"
OPTIONS_KEY = "platform.options"


@dataclass(frozen=True)
class Session:
    """The plugins of a process and its active platform.

    Attributes:
        hooks: The facade over the active platform, the extensions and the neutral default.
        platform: The active platform, with its options set.
        probe: Result of the platform's probe.
        choice_reason: Why the platform was chosen, for the first line of output.
        reports: Reports of all installed plugins.
        hidden: Installed packages of other devices that cannot be imported in this process.
        environment: Variables that the plugins have set in this process (:func:`open_process`), without those that
            were set before.
    """

    hooks: Hooks
    platform: Platform
    probe: Probe
    choice_reason: str
    reports: tuple[PluginReport, ...]
    hidden: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def use_options(self, options: Mapping[str, Any], *, settled: bool = False) -> None:
        """Validate the platform's options and pass them to the platform.

        Called when the session is opened, and by the driver when the plugins' edits have changed the options, so that
        the driver decides with the same options as the ranks.

        Args:
            options: ``platform.options``; empty = ``ANYTRON_PLATFORM_OPTIONS``.
            settled: Whether ``options`` include the plugins' edits, so that they may differ from
                ``ANYTRON_PLATFORM_OPTIONS``.

        Raises:
            ConfigError: ``options`` are not valid for the platform, or differ from ``ANYTRON_PLATFORM_OPTIONS``.
        """
        self.platform.configure_options(validated_options(self.platform, options, settled=settled))


@dataclass(frozen=True)
class Survey:
    """The reports of all installed plugins, and the error if no platform can be chosen (None if one is active)."""

    reports: tuple[PluginReport, ...]
    error: PlatformError | None


def open_session(
    platform: str | None = None,
    options: Mapping[str, Any] | None = None,
    engine: str | None = None,
    *,
    settled: bool = False,
) -> Session:
    """Load the plugins, choose the platform, and hide the packages of other devices.

    Worker processes call this again with the name that the driver chose, so that all of them agree.

    Args:
        platform: ``platform.name`` of the configuration; None = ``ANYTRON_PLATFORM``, else the probes.
        options: ``platform.options``; None or empty = ``ANYTRON_PLATFORM_OPTIONS``.
        engine: ``engine.name``; None outside of a run.
        settled: Whether ``options`` include the plugins' edits, so that they may differ from
            ``ANYTRON_PLATFORM_OPTIONS``.

    Raises:
        PlatformError: The platform asked for cannot be used, or the probes leave no single choice.
        PluginError: An extension cannot be loaded. It is never skipped silently.
        ConfigError: ``options`` are not valid for the platform, or differ from ``ANYTRON_PLATFORM_OPTIONS``.
    """
    disable_device_autoload()
    found = find_plugins()
    asked = asked_platform(platform)
    probes = probe_platforms(found, only=asked.name if asked else None)
    choice = choose_platform(found, probes, asked)
    _refuse_broken_extensions(found)
    hidden = hide_foreign_devices([one.platform for one in found if one.platform], choice.platform)
    hooks = _facade(found, choice)
    reports = settled_reports(found, probes, choice)
    session = Session(hooks, choice.platform, choice.probe, choice.reason, tuple(reports), hidden)
    session.platform.engine = engine
    session.use_options(options or {}, settled=settled)
    return session


def open_process(process: ProcessInfo, config: RunConfig, *, platform: str | None, engine: str | None) -> Session:
    """Open a session as every process of a run does, and set the environment variables that its plugins ask for.

    Called before anything imports the device's libraries. A worker of a run has those variables from the driver
    already, and keeps them.

    Args:
        process: Description of this process.
        config: The run's configuration with all edits, or :func:`anytron.config.schema.default_run`.
        platform: Name of the platform that the driver has chosen.
        engine: Name of the engine of this process; None outside of a run.

    Raises:
        AnytronError: As :func:`open_session` and :meth:`Hooks.runtime_env`.
    """
    session = open_session(platform, config.platform.options, engine, settled=True)
    wanted = session.hooks.runtime_env(process, config)
    environment = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(environment)
    return replace(session, environment=environment)


def survey_plugins(configured: str | None = None) -> Survey:
    """Report on all installed plugins, whatever state they are in.

    Every platform is probed; one with ``chosen_by_name_only`` only if it is named or no other accelerator is there.

    Args:
        configured: ``platform.name`` of a run; None = ``ANYTRON_PLATFORM``, else the probes.

    Raises:
        PluginError: ``ANYTRON_PLUGINS`` names a plugin that is not installed.
    """
    disable_device_autoload()
    found = find_plugins()
    asked = asked_platform(configured)
    probes = probe_platforms(found, named=asked.name if asked else None)
    choice: Choice | None = None
    error: PlatformError | None = None
    try:
        choice = choose_platform(found, probes, asked)
    except PlatformError as refused:
        error = refused
    reports = settled_reports(found, probes, choice)
    checked = [_with_requirements(report, one.member) for report, one in zip(reports, found, strict=True)]
    return Survey(tuple(checked), error)


def hooks_of(platform: Platform | None = None, extensions: Mapping[str, object] | None = None) -> Hooks:
    """Put a facade together from plugin objects and the neutral default, without discovery.

    Args:
        platform: The active platform; None = no platform, so that extensions and the neutral default answer.
        extensions: Other plugins by name; None = no other plugins.

    Raises:
        PluginError: A plugin's hooks break the specifications.
    """
    members = [] if platform is None else [read_member(platform, platform.name, Precedence.PLATFORM)]
    members += [read_member(plugin, name, Precedence.EXTENSION) for name, plugin in (extensions or {}).items()]
    return Hooks([*members, _neutral()])


def disable_device_autoload() -> None:
    """Keep ``import torch`` from importing device extensions by itself.

    With an extension installed whose driver is missing, the autoload makes ``import torch`` itself
    fail (torch/__init__.py, ``_import_device_backends``). The active platform loads its own device.
    A value that the user has set is kept. Call this before torch is imported; worker processes inherit the setting.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def validated_options(platform: Platform, options: Mapping[str, Any], *, settled: bool = False) -> BaseModel | None:
    """Validate the platform's options, from the configuration or from :data:`OPTIONS_VARIABLE`.

    A process without a configuration, such as a process of another framework, takes them from the variable. A run's
    configuration and the variable must agree: neither wins silently.

    Args:
        platform: The platform that defines the options.
        options: ``platform.options``; empty = take them from the variable.
        settled: Whether ``options`` belong to a run and include the edits of its plugins. Such options are not compared
            with the variable, because the user's own options have been compared already.

    Returns:
        An instance of ``platform.options_model``; None if the platform has no options.

    Raises:
        ConfigError: Unknown keys (with the nearest known names) or values of the wrong type, all at once; or the
            variable is not a JSON object, or differs from ``options``.
    """
    said = {} if settled and options else options_of_variable()
    if said and options and said != options:
        raise ConfigError(
            "The platform's options are set in two places, with different values.",
            where=f"{OPTIONS_KEY}, {OPTIONS_VARIABLE}",
            why="a run would silently ignore one of the two values",
            fix=f"unset {OPTIONS_VARIABLE}, or remove {OPTIONS_KEY}",
        )
    model, given = platform.options_model, dict(options or said)
    refuse(model_diagnostics(model, given, OPTIONS_VARIABLE if said and not options else OPTIONS_KEY))
    return None if model is None else model.model_validate(given)


def options_of_variable() -> dict[str, Any]:
    """Read :data:`OPTIONS_VARIABLE`; empty if it is not set.

    Raises:
        ConfigError: The variable is not a JSON object.
    """
    text = os.environ.get(OPTIONS_VARIABLE, "")
    try:
        return parse_object(text) if text else {}
    except ValueError as error:
        raise _malformed(str(error)) from error


def _malformed(why: str) -> ConfigError:
    fix = f"""set it to a JSON object, for example {OPTIONS_VARIABLE}='{{"tile": 64}}'"""
    return ConfigError(f"{OPTIONS_VARIABLE} is not a JSON object.", where="environment variables", why=why, fix=fix)


def _neutral() -> Member:
    return read_member(NeutralDefaults(), NeutralDefaults.name, Precedence.DEFAULT)


def _facade(found: Sequence[Found], choice: Choice) -> Hooks:
    members = [candidate.member for candidate in found if candidate.member and candidate.platform is None]
    return Hooks([choice.member, *members, _neutral()])


def _refuse_broken_extensions(found: Sequence[Found]) -> None:
    reports = [one.report for one in found if one.report.kind == "extension" and one.member is None]
    refused = [report for report in reports if report.state is not State.BLOCKED]
    if refused:
        names = ",".join(sorted({report.name for report in refused}))
        remedies = list(dict.fromkeys(report.remedy for report in refused))
        if not any(DISABLE in remedy for remedy in remedies):
            remedies.append(f"or exclude {names}: set {DISABLE}={names}")
        raise PluginError(
            f"Installed plugins cannot be used: {names}.",
            where=", ".join(sorted({f"{report.distribution} {report.version}" for report in refused})),
            why="; ".join(report.reason for report in refused),
            fix="; ".join(remedies),
        )


def _with_requirements(report: PluginReport, member: Member | None) -> PluginReport:
    """Add an active plugin's requirements, and set its state if one of them is not met.

    Plugins are examined one at a time, so that no plugin hides the requirements of another.
    """
    if member is None or report.state is not State.ACTIVE:
        return report
    try:
        findings = examine_requirements(Hooks([member]).requirements())
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises becomes its report
        return replace(report, state=State.BROKEN, reason=f"its hook requirements failed: {error}")
    report = replace(report, requirements=tuple(findings))
    unmet = [one for one in findings if not one.fits and not one.requirement.optional]
    if not unmet:
        return report
    reason, remedy = "; ".join(one.reason for one in unmet), "; ".join(dict.fromkeys(one.remedy for one in unmet))
    return replace(report, state=State.INCOMPATIBLE, reason=reason, remedy=remedy)
