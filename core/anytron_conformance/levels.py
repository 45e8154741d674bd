"""The rules of each level."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError, did_you_mean
from anytron_conformance.rules import LEVELS, Level, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence


def rules_of(level: Level) -> tuple[Rule, ...]:
    """Import a level and give its rules, in order. Imports torch."""
    rules: tuple[Rule, ...] = importlib.import_module(f"anytron_conformance.{level}").RULES
    return rules


def find_rule(level: Level, name: str) -> Rule:
    """Give one rule of a level."""
    return next(rule for rule in rules_of(level) if rule.title == name)


def checked_levels(asked: Sequence[str]) -> tuple[Level, ...]:
    """Give the levels that were asked for in their order; all of them if none was.

    Raises:
        ConfigError: There is no such level.
    """
    for name in asked:
        if name not in LEVELS:
            raise ConfigError(
                f"There is no level '{name}'.",
                where="--level",
                why=f"the levels are {', '.join(LEVELS)}",
                fix=did_you_mean(name, LEVELS),
            )
    return tuple(level for level in LEVELS if level in asked or not asked)
