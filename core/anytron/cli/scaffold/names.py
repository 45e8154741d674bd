"""The words that a platform's name becomes, and which names a new platform may have."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import entry_points

from anytron.base.errors import PluginError
from anytron.device.loading.discovery import GROUPS
from anytron.device.loading.known import OFFICIAL_PLATFORMS

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TEMPLATE = "acme"


@dataclass(frozen=True)
class Names:
    """What a new platform is called in each place.

    Attributes:
        platform: What users write in ``platform.name``: lower-case words with hyphens.
    """

    platform: str

    @property
    def distribution(self) -> str:
        """What ``pip install`` is given."""
        return f"anytron-{self.platform}"

    @property
    def package(self) -> str:
        """What ``import`` is given."""
        return f"anytron_{self.platform.replace('-', '_')}"

    def fill(self, text: str) -> str:
        """Put the name into text, or a path, of the template."""
        forms = {
            f"anytron_{_TEMPLATE}": self.package,
            _TEMPLATE.capitalize(): "".join(word.capitalize() for word in self.platform.split("-")),
            _TEMPLATE: self.platform,
        }
        return re.sub("|".join(forms), lambda found: forms[found.group()], text)


def names_of(platform: str) -> Names:
    """Check the name of a new platform.

    Raises:
        PluginError: It is no name, or an installed or official plugin has it.
    """
    normal = re.sub(r"[-_.]+", "-", platform).strip("-").lower()
    if not _NAME.fullmatch(platform):
        raise PluginError(
            f"'{platform}' cannot be the name of a platform.",
            where="anytron new-platform",
            why="it becomes the name of a distribution, of an import package and of a class: lower-case letters, "
            "digits and single hyphens, beginning with a letter",
            fix=f"anytron new-platform {normal}"
            if _NAME.fullmatch(normal)
            else "for example anytron new-platform acme",
        )
    names = Names(platform)
    if reason := _taken(names):
        ours = f"pip uninstall {names.distribution}, or " if names.distribution in reason else ""
        raise PluginError(
            f"A plugin '{platform}' exists already.",
            where="anytron new-platform",
            why=reason,
            fix=f"{ours}choose another name; anytron plugins list shows the names in use",
        )
    return names


def _taken(names: Names) -> str:
    """Why the name cannot be used; empty if it can."""
    if names.platform in OFFICIAL_PLATFORMS:
        return f"it is a platform of this project: {OFFICIAL_PLATFORMS[names.platform]}"
    for group in GROUPS:
        for point in entry_points(group=group, name=names.platform):
            return f"the installed distribution {point.dist.name if point.dist else 'of ' + point.value} offers it"
    if importlib.util.find_spec(names.package) is not None:
        return f"an import package {names.package} is installed"
    return ""
