"""What is left to say of a run that has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class RunSummary:
    """What a run says of itself when it ends.

    Attributes:
        output_dir: Where its files lie.
        steps: Training steps behind it, those before a resume included.
        metrics: Those of the last step.
        seconds: Wall-clock time of the training steps of this process, without start-up and saving the model.
        stopped_by: Name of the signal that ended it before its last step or the saving of its model; None without.
        early_stop: Why validation ended it before its last step; None if it did not.
    """

    output_dir: Path
    steps: int
    metrics: Mapping[str, float]
    seconds: float
    stopped_by: str | None = None
    early_stop: str | None = None
