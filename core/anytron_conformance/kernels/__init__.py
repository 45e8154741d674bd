"""Level ``kernels``: attention, log-probs and every fused kernel against float64, in values and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron_conformance.kernels import (
    attention,
    behaviour,
    fused,
    invariance,
    invariant_attention,
    invariant_model,
    linear_attention,
    log_probs,
    micro_batch,
    no_rows,
)

if TYPE_CHECKING:
    from anytron_conformance.rules import Rule

RULES: tuple[Rule, ...] = (
    *attention.RULES,
    *micro_batch.RULES,
    *log_probs.RULES,
    *fused.RULES,
    *linear_attention.RULES,
    fused.adam,
    *no_rows.RULES,
    *behaviour.RULES,
    *invariance.RULES,
    *invariant_attention.RULES,
    *invariant_model.RULES,
)
