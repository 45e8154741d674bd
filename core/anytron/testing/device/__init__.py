"""Level ``device``: the runtime, its random numbers, memory and collectives, the environment, options and patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.testing.rules import Rule

RULES: tuple[Rule, ...] = ()
