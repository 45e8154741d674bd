"""Results of measured differences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from anytron.base.results import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.base.results import Status


def measured(check: str, difference: float, tolerance: float, detail: str) -> Result:
    """Make the result of a check that measured a difference; NaN fails."""
    status: Status = "passed" if difference <= tolerance else "failed"
    return Result(check, status, detail, difference=difference, tolerance=tolerance)


def joined(results: Sequence[Result]) -> Result:
    """Make one result of those of several models, the critic's last: the worst, with what all of them say."""
    if len(results) == 1:
        return results[0]
    worst = max(results, key=lambda one: (one.status == "failed", used(one.difference, one.tolerance)))
    policy, critic = (one.detail for one in results)
    return replace(worst, detail=f"{policy}; the critic: {critic}")


def used(difference: float | None, tolerance: float | None) -> float:
    """Say which part of its tolerance a difference takes; NaN is more than any number."""
    part = (difference or 0.0) / (tolerance or 1.0)
    return math.inf if math.isnan(part) else part
