"""What follows when a process is lost: it starts again, as long as the run gets on in between."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from anytron.base.errors import LostDirectoryError, WorkerError
from anytron.base.files import open_to_append
from anytron.record.tracking.claim import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anytron.base.errors import AnytronError


class Restarts:
    """Decides whether a run goes on after a loss, and records it.

    Losses are counted in a row. A step that is finished for the first time ends the row; one that is repeated after a
    restart does not, or what kills every attempt at the same step would do so for ever.

    Args:
        limit: Losses in a row after which the run goes on (``trainer.max_restarts``).
        output_dir: The run's directory.
        tell: Called with each loss.

    Attributes:
        has_lost: A process was lost in this run, so that the run's directory holds ``run.json``.
    """

    def __init__(self, limit: int, output_dir: Path, tell: Callable[[str], None]) -> None:
        self._limit, self._tell = limit, tell
        self._file = output_dir / LOSSES
        self._in_a_row = 0
        self._furthest = 0
        self.has_lost = False

    def finished(self, step: int) -> None:
        """Note that a step is done."""
        if step > self._furthest:
            self._furthest, self._in_a_row = step, 0

    def lost(self, error: AnytronError, then: str) -> None:
        """Record a loss.

        Args:
            error: What was lost, and how.
            then: What the run does about it.

        Raises:
            WorkerError: It is one too many.
            LostDirectoryError: The run's directory is not there any more.
        """
        goes_on = self._in_a_row < self._limit
        self._in_a_row += 1
        self.has_lost = True
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "after_step": self._furthest,
            "in_a_row": self._in_a_row,
            "lost": error.what,
            "where": error.where,
            "why": error.why,
            "then": then if goes_on else "the run ends",
        }
        try:
            with os.fdopen(open_to_append(self._file), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except FileNotFoundError as gone:
            raise LostDirectoryError(
                "The output directory was removed or replaced.",
                where=f"trainer.output_dir = {self._file.parent}",
                why=f"{gone}; before that, a process was lost: {error.headline}",
                fix="start the run again",
            ) from error
        if goes_on:
            self._tell(f"{error.what} {then[0].upper()}{then[1:]} ({self._in_a_row} of {self._limit} in a row).")
            return
        advice = f"it was loss number {self._in_a_row} without a finished step in between: see {self._file}"
        fix = [error.fix, *([advice] if self._limit else [])]
        raise WorkerError(error.what, where=error.where, why=error.why, fix="; ".join(filter(None, fix))) from None
