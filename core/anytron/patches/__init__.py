"""Patches of third-party code as data, and the ledger that applies, verifies and undoes them."""

from anytron.patches.ledger import Ledger
from anytron.patches.patch import Installed, Outcome, Patch, PatchRecord, Phase, Supersession
from anytron.patches.plan import Judgement, Verdict, plan

__all__ = [
    "Installed",
    "Judgement",
    "Ledger",
    "Outcome",
    "Patch",
    "PatchRecord",
    "Phase",
    "Supersession",
    "Verdict",
    "plan",
]
