"""Level ``model``: tiny models of nine families, compared with transformers, and in several layouts."""

from anytron_conformance.model.empty_shares import with_empty_shares
from anytron_conformance.model.marks import parameters_keep_marks
from anytron_conformance.model.parts import adapters, critic, prediction, router_replay
from anytron_conformance.model.rules import RULES as WHOLE_MODELS

__all__ = ["RULES"]

RULES = (parameters_keep_marks, *WHOLE_MODELS, router_replay, adapters, prediction, critic, with_empty_shares)
