"""``anytron verify``: is this model, in this layout, on this machine, computed right, before money is spent?"""

from anytron.verification.checks import CHECKS
from anytron.verification.report import CheckResult, Status

__all__ = ["CHECKS", "CheckResult", "Status"]
