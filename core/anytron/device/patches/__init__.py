"""Patches of third-party code as data, and the ledger that applies, verifies and undoes them."""

from anytron.device.patches.ledger import Ledger
from anytron.device.patches.patch import Installed, Outcome, Patch, PatchRecord, Phase, Supersession
from anytron.device.patches.plan import Judgement, Verdict, plan

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
