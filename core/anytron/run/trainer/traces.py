"""Record chosen steps with torch's profiler (``trainer.profile``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.record.tracking.claim import PROFILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anytron.config.running import ProfileSection
    from anytron.run.trainer.workers import TrainingWorkers


class Traces:
    """Lets training ranks record steps. What goes wrong with it is told and does not stop the run.

    Args:
        profile: Which steps and ranks; None = nothing is recorded.
        trainer: The ranks.
        directory: The run's.
        tell: Is told of each trace.
        warn: Is told why there is none.
    """

    def __init__(
        self,
        profile: ProfileSection | None,
        trainer: TrainingWorkers,
        directory: Path,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._profile, self._trainer, self._directory = profile, trainer, directory
        self._tell, self._warn = tell, warn

    def begin(self, step: int) -> None:
        """Begin to record, if this step is to be."""
        if self._profile is not None and step in self._profile.steps:
            self._trainer.begin_traces(self._profile.ranks, stacks=self._profile.stacks, memory=self._profile.memory)

    def end(self, step: int) -> None:
        """Write a file for each recorded rank, ``profile/step-00003-rank-0.json.gz``."""
        if self._profile is None or step not in self._profile.steps:
            return
        paths = [self._directory / PROFILE / f"step-{step:05d}-rank-{rank}.json.gz" for rank in self._profile.ranks]
        largest = int(self._profile.max_mib * 2**20)
        reasons = self._trainer.end_traces(dict(zip(self._profile.ranks, map(str, paths), strict=True)), largest)
        for path, rank in zip(paths, self._profile.ranks, strict=True):
            if (why := reasons[rank]) is None:
                self._tell(f"step {step} of rank {rank} was recorded: {path}")
            else:
                self._warn(f"step {step} of rank {rank} was recorded, and there is no trace: {why}")
