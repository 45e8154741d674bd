"""Level ``sequences``: layouts, micro-batches and their scopes, masks, and the way back to flat values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.testing.rules import Rule

RULES: tuple[Rule, ...] = ()
