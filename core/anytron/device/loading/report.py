"""The state of each installed plugin and of the packages that it needs, with the reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, distributions, requires
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement as Declared
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from anytron.base.errors import AnytronError, PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anytron.device.hooks.facade import Hooks
    from anytron.device.hooks.types import Requirement

Kind = Literal["platform", "extension"]


class State(str, Enum):
    """The state of a plugin."""

    ACTIVE = "active"
    """Its hooks are called: an extension, or the one chosen platform."""
    AVAILABLE = "available"
    """A platform that could be chosen and was not."""
    UNAVAILABLE = "unavailable"
    """A platform whose device is not on this machine."""
    BROKEN = "broken"
    """The plugin cannot be imported or breaks the contract, or its device is present but cannot be used."""
    BLOCKED = "blocked"
    """The user excluded it: ``ANYTRON_PLUGINS`` or ``ANYTRON_DISABLE_PLUGINS``."""
    INCOMPATIBLE = "incompatible"
    """The plugin was written for another version of the contract, or a package is missing or out of range."""
    DUPLICATE = "duplicate"
    """Several distributions offer this name; none of them is used."""


@dataclass(frozen=True)
class PluginReport:
    """One line of ``anytron plugins list``.

    Attributes:
        name: The entry point's name.
        kind: ``platform`` or ``extension``.
        distribution: The distribution that contains the plugin.
        version: Version of that distribution.
        state: State of the plugin.
        reason: Why the plugin is in that state, in one sentence.
        hooks: Hooks that the plugin implements, in order of the specifications.
        remedy: How to fix the problem; empty if nothing is wrong.
        requirements: The packages that an active plugin needs, and what is installed.
    """

    name: str
    kind: Kind
    distribution: str
    version: str
    state: State
    reason: str
    hooks: tuple[str, ...] = ()
    remedy: str = ""
    requirements: tuple[Finding, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the plugin itself is at fault and no run can use it.

        It is not the plugin's fault that its device is absent, that the user excluded it, or that a package that it
        needs is missing (a run with another engine may not need the package).
        """
        at_fault = (State.BROKEN, State.DUPLICATE, State.INCOMPATIBLE)
        return self.state in at_fault and not self.requirements

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values; ``remedy`` and ``requirements`` only where there are any."""
        values: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "distribution": self.distribution,
            "version": self.version,
            "state": self.state.value,
            "reason": self.reason,
            "hooks": list(self.hooks),
        }
        if self.remedy:
            values["remedy"] = self.remedy
        if self.requirements:
            values["requirements"] = [finding.as_json() for finding in self.requirements]
        return values


@dataclass(frozen=True)
class Finding:
    """A requirement, and the version that is installed.

    Attributes:
        plugin: The plugin that needs the package.
        requirement: The package that the plugin needs, and the range of its versions.
        installed: The version that an import would find; None if the package is missing.
        locations: Directories that contain the package, first the one that an import would find; if there are several,
            the package is installed more than once on ``sys.path``.
        fits: Whether ``installed`` lies in the range.
    """

    plugin: str
    requirement: Requirement
    installed: str | None
    locations: tuple[str, ...]
    fits: bool

    @property
    def reason(self) -> str:
        """What the plugin needs and what is installed, in one sentence."""
        needed = f"{self.requirement.package}{self.requirement.specifier}"
        found = "it is not installed" if self.installed is None else f"{self.installed} is installed"
        return f"plugin '{self.plugin}' needs {needed}, {found}"

    @property
    def remedy(self) -> str:
        """The command to run, or the setting to change."""
        return self.requirement.remedy or f"pip install '{self.requirement.package}{self.requirement.specifier}'"

    def as_json(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return {
            "package": self.requirement.package,
            "specifier": self.requirement.specifier,
            "optional": self.requirement.optional,
            "installed": self.installed,
            "locations": list(self.locations),
            "fits": self.fits,
        }

    def as_line(self) -> str:
        """The finding as one line of text: the requirement, the installed version and its directory."""
        needed = f"{self.requirement.package}{self.requirement.specifier}"
        if self.installed is None:
            return f"{needed}: not installed" + (" (optional)" if self.requirement.optional else "")
        first, *others = self.locations
        again = f"; AGAIN in {', '.join(others)}" if others else ""
        return f"{needed}: {'' if self.fits else 'UNFIT '}{self.installed} in {first}{again}"


def examine_requirements(needs: Iterable[tuple[str, Requirement]]) -> list[Finding]:
    """Find the installed version of every package that is needed.

    Args:
        needs: (plugin, requirement) pairs, as :meth:`Hooks.requirements` gives them.

    Raises:
        PluginError: A version range is not PEP 440.
    """
    findings = []
    for plugin, requirement in needs:
        try:
            wanted = SpecifierSet(requirement.specifier)
        except InvalidSpecifier as error:
            raise PluginError(
                f"Plugin '{plugin}' gives an invalid version range for {requirement.package}.",
                where=f"hook requirements of '{plugin}'",
                why=str(error),
                fix="write the range as in PEP 440, for example >=1.2,<2",
            ) from error
        found = list(distributions(name=requirement.package))
        installed = found[0].version if found else None
        # A directory that is listed twice on sys.path is one place.
        locations = tuple(dict.fromkeys(str(one.locate_file("")) for one in found))
        fits = installed is not None and wanted.contains(installed, prereleases=True)
        findings.append(Finding(plugin, requirement, installed, locations, fits))
    return findings


def check_requirements(hooks: Hooks, engine: str | None = None) -> list[Finding]:
    """Refuse a run whose plugins lack a package, before anything heavy is imported.

    Args:
        hooks: The facade over all plugins.
        engine: The training engine of the run; None = no run in particular.

    Returns:
        Optional requirements that are not fulfilled, to be reported.

    Raises:
        PluginError: A requirement that is not optional is unfulfilled; the error lists all of them.
    """
    unmet = [finding for finding in examine_requirements(hooks.requirements(engine)) if not finding.fits]
    needed = [one for one in unmet if not one.requirement.optional]
    if needed:
        raise PluginError(
            "Packages that plugins need are missing or have the wrong version.",
            where=", ".join(sorted({one.plugin for one in needed})),
            why="; ".join(one.reason for one in needed),
            fix="; ".join(dict.fromkeys(one.remedy for one in needed)),
        )
    return unmet


def not_installed(error: BaseException) -> AnytronError | None:
    """Return an error which says that a package that Anytron requires is missing; None if ``error`` is another one."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    try:
        declared = [Declared(line) for line in requires("anytron") or () if "extra ==" not in line]
    except PackageNotFoundError:  # it runs from its sources, and nothing says what it needs
        return None
    for one in declared:
        if canonicalize_name(one.name) == canonicalize_name(module):
            return AnytronError(
                f"The package {one.name} is not installed.",
                where=sys.prefix,
                why=f"anytron needs {one}",
                fix=f"pip install '{one}'; anytron doctor says what else is missing",
            )
    return None
