"""Check the packages that plugins need, by their metadata: nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from anytron.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anytron.hooks.facade import Hooks
    from anytron.hooks.types import Requirement


@dataclass(frozen=True)
class Unmet:
    """A requirement that is not fulfilled.

    Attributes:
        plugin: Who needs it.
        requirement: What it needs.
        installed: The version found; None if the package is missing.
    """

    plugin: str
    requirement: Requirement
    installed: str | None

    @property
    def reason(self) -> str:
        """One sentence."""
        needed = f"{self.requirement.package}{self.requirement.specifier}"
        found = "it is not installed" if self.installed is None else f"{self.installed} is installed"
        return f"plugin '{self.plugin}' needs {needed}, {found}"

    @property
    def remedy(self) -> str:
        """What to run."""
        return self.requirement.remedy or f"pip install '{self.requirement.package}{self.requirement.specifier}'"


def unmet_requirements(needs: Iterable[tuple[str, Requirement]]) -> list[Unmet]:
    """Find what is missing or of an unfitting version.

    Args:
        needs: (plugin, requirement) pairs, as :meth:`Hooks.requirements` gives them.

    Raises:
        PluginError: A version range is not PEP 440.
    """
    unmet = []
    for plugin, requirement in needs:
        try:
            wanted = SpecifierSet(requirement.specifier)
        except InvalidSpecifier as error:
            raise PluginError(
                f"Plugin '{plugin}' asks for an impossible version of {requirement.package}.",
                where=f"hook requirements of '{plugin}'",
                why=str(error),
                fix="write the range as in PEP 440, for example >=1.2,<2",
            ) from error
        try:
            installed = version(requirement.package)
        except PackageNotFoundError:
            unmet.append(Unmet(plugin, requirement, None))
            continue
        if not wanted.contains(installed, prereleases=True):
            unmet.append(Unmet(plugin, requirement, installed))
    return unmet


def check_requirements(hooks: Hooks) -> list[Unmet]:
    """Stop before anything heavy is imported if a package is missing or unfitting.

    Returns:
        Optional requirements that are not fulfilled, to be reported.

    Raises:
        PluginError: With every unfulfilled requirement that is not optional.
    """
    unmet = unmet_requirements(hooks.requirements())
    needed = [one for one in unmet if not one.requirement.optional]
    if needed:
        raise PluginError(
            "Packages that plugins need are missing or do not fit.",
            where=", ".join(sorted({one.plugin for one in needed})),
            why="; ".join(one.reason for one in needed),
            fix="; ".join(dict.fromkeys(one.remedy for one in needed)),
        )
    return unmet
