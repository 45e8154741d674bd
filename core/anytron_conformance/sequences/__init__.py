"""Level ``sequences``: layouts, micro-batches and their scopes, masks, and the conversion of outputs to flat values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron_conformance.sequences.layouts import (
    alignment_suffices,
    constraints_are_fixed,
    context_parallel_outputs,
    inputs_keep_tokens,
    outputs_come_back,
)
from anytron_conformance.sequences.masks import (
    mask_by_influence,
    mask_companions,
    mask_is_read,
    padding_without_influence,
)
from anytron_conformance.sequences.scopes import scopes_nest, scopes_restore

if TYPE_CHECKING:
    from anytron_conformance.rules import Rule

RULES: tuple[Rule, ...] = (
    constraints_are_fixed,
    inputs_keep_tokens,
    scopes_restore,
    scopes_nest,
    outputs_come_back,
    mask_companions,
    mask_is_read,
    mask_by_influence,
    padding_without_influence,
    alignment_suffices,
    context_parallel_outputs,
)
