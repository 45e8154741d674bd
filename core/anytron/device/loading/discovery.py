"""Load every installed plugin on its own, so that a broken one never hides another.

pluggy's ``load_setuptools_entrypoints`` is not used: it stops at the first plugin that fails to
import, and skips a second plugin of the same name in silence.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from anytron.base.errors import PluginError
from anytron.device.hooks.registry import Member, Precedence, read_member, specifications
from anytron.device.loading.report import Kind, PluginReport, State
from anytron.device.platform import API_VERSION, Platform

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

GROUPS: dict[str, Kind] = {"anytron.platforms": "platform", "anytron.plugins": "extension"}
ALLOW, DISABLE = "ANYTRON_PLUGINS", "ANYTRON_DISABLE_PLUGINS"


@dataclass(frozen=True)
class Found:
    """An installed plugin: its report and, if it could be loaded, its hooks.

    Attributes:
        report: The plugin's report; its state is ``available`` if the plugin could be loaded.
        member: The plugin's hooks; None if it was not loaded.
        platform: The platform's instance; None for an extension, or if the plugin was not loaded.
    """

    report: PluginReport
    member: Member | None = None
    platform: Platform | None = None


class _RefusedError(Exception):
    """Says why a plugin cannot be used; it becomes the plugin's report."""

    def __init__(self, state: State, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.state, self.reason, self.remedy = state, reason, remedy


def find_plugins() -> list[Found]:
    """Load all installed plugins, sorted by kind and name.

    ``ANYTRON_PLUGINS`` (names, separated by commas) is an allow list: of plugins that do not ship in
    the ``anytron`` distribution itself, only those are loaded. ``ANYTRON_DISABLE_PLUGINS`` excludes
    names, plugins of the ``anytron`` distribution too. A plugin that is excluded is not imported.

    Raises:
        PluginError: ``ANYTRON_PLUGINS`` names a plugin that is not installed.
    """
    points = [(group, point) for group in GROUPS for point in entry_points(group=group)]
    points.sort(key=lambda item: (GROUPS[item[0]] != "platform", item[1].name, _distribution(item[1])))
    allowed, disabled = _listed(ALLOW), _listed(DISABLE) or frozenset()
    _check_lists(allowed, disabled, {point.name for _, point in points})
    count = Counter(point.name for _, point in points)
    found: list[Found] = []
    for group, point in points:
        report = _blank_report(GROUPS[group], point)
        if blocked := _blocked_by(report, allowed, disabled):
            reason = f"excluded by {blocked}={os.environ[blocked]}"
            found.append(
                Found(replace(report, state=State.BLOCKED, reason=reason, remedy=f"change or unset {blocked}"))
            )
        elif count[point.name] > 1:
            found.append(Found(_duplicate(report, (other for _, other in points if other.name == point.name))))
        else:
            found.append(_load(report, point))
    return found


def _listed(variable: str) -> frozenset[str] | None:
    """Names in an environment variable; None if it is not set."""
    text = os.environ.get(variable)
    return None if text is None else frozenset(name.strip() for name in text.split(",") if name.strip())


def _check_lists(allowed: frozenset[str] | None, disabled: frozenset[str], installed: set[str]) -> None:
    if unknown := sorted((allowed or frozenset()) - installed):
        raise PluginError(
            f"{ALLOW} names plugins that are not installed: {', '.join(unknown)}.",
            where=f"environment variable {ALLOW}",
            why=f"installed plugins: {', '.join(sorted(installed)) or 'none'}",
            fix="correct the name, install the plugin, or unset the variable",
        )
    if unknown := sorted(disabled - installed):
        # Not an error: one setting is often shared by machines on which different plugins are installed.
        logger.warning("%s names plugins that are not installed: %s", DISABLE, ", ".join(unknown))


def _blocked_by(report: PluginReport, allowed: frozenset[str] | None, disabled: frozenset[str]) -> str | None:
    if report.name in disabled:
        return DISABLE
    if allowed is not None and report.name not in allowed and report.distribution != "anytron":
        return ALLOW
    return None


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"


def _blank_report(kind: Kind, point: EntryPoint) -> PluginReport:
    version = point.dist.version if point.dist is not None else ""
    return PluginReport(point.name, kind, _distribution(point), version, State.AVAILABLE, "installed")


def _duplicate(report: PluginReport, points: Iterable[EntryPoint]) -> PluginReport:
    owners = sorted(f"{_distribution(point)} ({point.value})" for point in points)
    return replace(
        report,
        state=State.DUPLICATE,
        reason=f"several plugins are called '{report.name}' and none of them is used: {', '.join(owners)}",
        remedy="uninstall all but one of these distributions",
    )


def _load(report: PluginReport, point: EntryPoint) -> Found:
    try:
        plugin = _instance(report, point)
        precedence = Precedence.PLATFORM if report.kind == "platform" else Precedence.EXTENSION
        member = read_member(plugin, report.name, precedence)
    except _RefusedError as refused:
        return Found(replace(report, state=refused.state, reason=refused.reason, remedy=refused.remedy))
    except PluginError as error:
        reason = f"{error.what} ({error.where}: {error.why})"
        return Found(replace(report, state=State.BROKEN, reason=reason, remedy=error.fix))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a plugin raises becomes its report
        # pluggy looks through all attributes for marked methods; before 1.7 that ran properties.
        reason = f"its hooks cannot be read: {type(error).__name__}: {error}"
        return Found(replace(report, state=State.BROKEN, reason=reason, remedy=f"correct {point.value}"))
    hooks = tuple(hook for hook in specifications() if hook in member.calls)
    return Found(replace(report, hooks=hooks), member, plugin if isinstance(plugin, Platform) else None)


def _instance(report: PluginReport, point: EntryPoint) -> object:
    """Import what the entry point names and make the plugin from it."""
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise _RefusedError(
            State.BROKEN,
            f"importing {point.value} of {report.distribution} failed: {type(error).__name__}: {error}",
            f'see the traceback with: python -c "import {point.value.partition(":")[0]}"; '
            f"then reinstall {report.distribution} or set {DISABLE}={report.name}",
        ) from error
    written_for = getattr(loaded, "api_version", API_VERSION)
    if written_for != API_VERSION:
        raise _RefusedError(
            State.INCOMPATIBLE,
            f"it was written for version {written_for} of the plugin contract, this anytron has {API_VERSION}",
            f"install versions of anytron and {report.distribution} that match",
        )
    if report.kind == "platform":
        _check_platform(report, point, loaded)
    if not inspect.isclass(loaded):
        return loaded
    try:
        return loaded()
    except (Exception, SystemExit) as error:
        raise _RefusedError(
            State.BROKEN,
            f"constructing {point.value} failed: {type(error).__name__}: {error}",
            "make the class constructible without arguments on any machine, also without its device",
        ) from error


def _check_platform(report: PluginReport, point: EntryPoint, loaded: object) -> None:
    if not (inspect.isclass(loaded) and issubclass(loaded, Platform)):
        raise _RefusedError(
            State.BROKEN,
            f"{point.value} is not a subclass of anytron.Platform",
            "make the entry point of group anytron.platforms name the platform's class",
        )
    if not hasattr(loaded, "api_version"):
        raise _RefusedError(
            State.BROKEN,
            f"the class {loaded.__name__} has no api_version, which states the version of the plugin contract",
            f"write api_version = {API_VERSION} into the class {loaded.__name__}, if it was written for this anytron",
        )
    if getattr(loaded, "name", None) != report.name:
        raise _RefusedError(
            State.BROKEN,
            f"the entry point is called '{report.name}', but the class has name = '{getattr(loaded, 'name', None)}'",
            f"give the entry point and the class the same name in {report.distribution}",
        )
    if loaded.options_model is not None and loaded.options_model.model_config.get("extra") != "forbid":
        raise _RefusedError(
            State.BROKEN,
            f"{loaded.options_model.__name__} would silently accept unknown options",
            f'write model_config = ConfigDict(extra="forbid") into the class {loaded.options_model.__name__}',
        )
