"""Errors and warnings about a run's configuration, collected so that a person can fix all mistakes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anytron.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Diagnostic:
    """An error or a warning about the run's configuration.

    Attributes:
        severity: ``error`` stops the run before it starts; a ``warning`` is shown.
        key: The dotted key concerned; empty = the configuration as a whole.
        message: Description of the problem.
        fix: How to fix it; may be empty.
        place: Where the key was set: file and line, or the override; empty if that is not known.
    """

    severity: Literal["error", "warning"]
    key: str
    message: str
    fix: str = ""
    place: str = ""

    @property
    def where(self) -> str:
        """The key, followed by the place in parentheses; only one of them if the other is empty."""
        return f"{self.key} ({self.place})" if self.key and self.place else self.key or self.place

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (f" - {self.fix}" if self.fix else "")


def refuse(diagnostics: Iterable[Diagnostic]) -> None:
    """Raise one error for all diagnostics of severity ``error``; do nothing if there are none.

    Raises:
        ConfigError: At least one diagnostic has the severity ``error``.
    """
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    if not errors:
        return
    if len(errors) == 1:
        only = errors[0]
        raise ConfigError("The configuration has a mistake.", where=only.where, why=only.message, fix=only.fix)
    lines = "".join(f"\n    {error}" for error in errors)
    raise ConfigError(
        f"The configuration has {len(errors)} mistakes.", why=lines, fix="correct them all; each says how"
    )
