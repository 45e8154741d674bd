"""The state of each installed plugin, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from anytron.device.loading.requirements import Finding

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
    """It cannot be imported, breaks the contract, or its device is there and cannot be used."""
    BLOCKED = "blocked"
    """The user excluded it: ``ANYTRON_PLUGINS`` or ``ANYTRON_DISABLE_PLUGINS``."""
    INCOMPATIBLE = "incompatible"
    """It was written for another version of the contract, or a package that it needs is missing or unfitting."""
    DUPLICATE = "duplicate"
    """Several distributions offer this name; none of them is used."""


@dataclass(frozen=True)
class PluginReport:
    """One line of ``anytron plugins list``.

    Attributes:
        name: The entry point's name.
        kind: ``platform`` or ``extension``.
        distribution: The distribution that offers it.
        version: That distribution's version.
        state: Its state.
        reason: Why it is in that state, in one sentence.
        hooks: Hooks that it implements, in order of the specifications.
        remedy: What to do about it; empty if nothing is wrong.
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

        A platform without its device, a plugin that the user excluded, and packages that a plugin needs and that
        are missing (a run with another engine may not need them) are no faults of the plugin.
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
