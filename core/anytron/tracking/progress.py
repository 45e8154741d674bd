"""Who is told how a run goes while it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Progress(Protocol):
    """Shows a run to a person. Called by the loop in the driver."""

    def start(self, total_steps: int, devices: Sequence[str]) -> None:
        """The workers are up, training on these ``devices``, one for each rank; the first step begins."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step is done; ``metrics`` are those of ``metrics.jsonl``."""

    def finish(self) -> None:
        """The last step is done; the model is about to be saved. Not called if the run fails."""
