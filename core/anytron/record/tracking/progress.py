"""The interface through which a run reports its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Progress:
    """Shows a run to a person; this one shows nothing. A context manager: leaving clears up, after errors too."""

    def start(self, total_steps: int, devices: Sequence[str], kernels: Mapping[str, str], done: int = 0) -> None:
        """The workers are up and the first step begins.

        Args:
            total_steps: Training steps of the run.
            devices: What each rank trains on.
            kernels: The plugins that supplied each kernel.
            done: Steps that an earlier process has done.
        """

    def part(self, name: str) -> None:
        """A part of a step begins: ``rollout``, ``update`` and so on."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step is done; ``metrics`` are those of ``metrics.jsonl``."""

    def note(self, text: str) -> None:
        """Something that a person should know: a checkpoint was saved, or what was found on resuming."""

    def warn(self, text: str) -> None:
        """Something is suspicious, and the run goes on."""

    def finish(self) -> None:
        """The last step is done; the model is about to be saved."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()
