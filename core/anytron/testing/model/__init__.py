"""Level ``model``: tiny models of every family, compared with transformers, and in several layouts."""

from anytron.testing.model.adapters import adapters
from anytron.testing.model.critic import critic
from anytron.testing.model.empty_shares import with_empty_shares
from anytron.testing.model.prediction import prediction
from anytron.testing.model.routing import router_replay
from anytron.testing.model.rules import RULES as WHOLE_MODELS

__all__ = ["RULES"]

RULES = (*WHOLE_MODELS, router_replay, adapters, prediction, critic, with_empty_shares)
