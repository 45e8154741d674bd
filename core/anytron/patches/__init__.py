"""Patches of third-party code as data, and the ledger that applies, verifies and undoes them."""

from anytron.patches.ledger import Ledger
from anytron.patches.patch import Outcome, Patch, PatchRecord, Phase

__all__ = ["Ledger", "Outcome", "Patch", "PatchRecord", "Phase"]
