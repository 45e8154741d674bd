"""``anytron verify``: check, before training, the computations of this model in this layout on this machine."""

from anytron.verification.checks import CHECKS
from anytron.verification.report import CheckResult, Report, Status

__all__ = ["CHECKS", "CheckResult", "Report", "Status"]
