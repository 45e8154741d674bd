"""Level ``training``: recorded trajectories and sampled steps, compared with the platform ``cpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.testing.rules import Rule

RULES: tuple[Rule, ...] = ()
