"""Level ``model``: tiny models of every family, compared with transformers, and in several layouts."""

from anytron.testing.model.rules import RULES

__all__ = ["RULES"]
