"""``anytron verify``: check before training that this model, in this layout, on this machine, is computed right."""

from anytron.verification.checks import CHECKS
from anytron.verification.report import CheckResult, Report, Status

__all__ = ["CHECKS", "CheckResult", "Report", "Status"]
