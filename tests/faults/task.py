"""The reward of the runs that are struck; now and then it is struck itself."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from tests.faults import saboteur

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.task.rewards import Sample


def reward(samples: Sequence[Sample]) -> list[float]:
    """Give the fraction of positions that hold the right digit."""
    saboteur.enter("reward-0")
    match saboteur.strike("reward.score"):
        case "hang":
            time.sleep(3600)
        case "raise":
            raise RuntimeError("the judge does not answer")
        case "exit":
            sys.exit(0)
        case "leave":
            os._exit(0)
        case "nan":
            return [float("nan")] * len(samples)
    return [
        sum(given == wanted for given, wanted in zip(sample.response_text, sample.data["answer"], strict=False)) / 4
        for sample in samples
    ]
