"""Mistakes in a configuration, collected so that a person can mend all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anytron.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Diagnostic:
    """A remark on the run's configuration; severity ``error`` stops the run before it starts."""

    severity: Literal["error", "warning"]
    key: str
    message: str
    fix: str = ""


@dataclass(frozen=True)
class Mistake:
    """One mistake: the key (and file and line, if known), what is wrong with it, and what would be right."""

    where: str
    why: str
    fix: str = ""


def refuse(mistakes: Sequence[Mistake]) -> None:
    """Raise one error for all mistakes; do nothing if there are none.

    Raises:
        ConfigError: There is at least one.
    """
    if not mistakes:
        return
    if len(mistakes) == 1:
        only = mistakes[0]
        raise ConfigError("the configuration has a mistake", where=only.where, why=only.why, fix=only.fix)
    lines = [f"\n    {m.where}: {m.why}" + (f" - {m.fix}" if m.fix else "") for m in mistakes]
    raise ConfigError(f"the configuration has {len(mistakes)} mistakes", why="".join(lines))
