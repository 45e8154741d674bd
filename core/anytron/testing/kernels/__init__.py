"""Level ``kernels``: attention, log-probs and every fused kernel against float64, in values and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.testing.rules import Rule

RULES: tuple[Rule, ...] = ()
