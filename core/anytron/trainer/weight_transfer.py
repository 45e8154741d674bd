"""Give rollout processes the training engine's weights, through shared memory or through a file."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from anytron.engines.weight_stream import WeightStream
from anytron.errors import AnytronError
from anytron.preflight.capabilities import why_not_shared
from anytron.rollout.pool import Given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.engines.weights import WeightManifest
    from anytron.executor.protocol import Executor, Pending, WorkerGroup
    from anytron.rollout.pool import GiveWeights
    from anytron.trainer.workers import TrainingWorkers


@dataclass(frozen=True)
class WeightTransfer:
    """The way that a run's weights take.

    Attributes:
        executor: Runs the training ranks and the rollout processes.
        directory: For the file or the sockets, of this user alone.
        shared: Through shared memory.
        timeout_s: How long one end waits for the other.
    """

    executor: Executor
    directory: Path
    shared: bool
    timeout_s: float
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def from_config(
        cls, config: RunConfig, executor: Executor, directory: Path, tell: Callable[[str], None]
    ) -> WeightTransfer:
        """Choose the way that ``rollout.weights`` says; tell which if it says ``auto``."""
        shared = config.rollout.weights == "shared_memory"
        if config.rollout.weights == "auto":
            obstacle = why_not_shared(config, on_this_machine=executor.on_this_machine)
            shared = obstacle is None
            tell("weights go to the rollout through " + ("shared memory" if shared else f"a file: {obstacle}"))
        return cls(executor, directory, shared, config.executor.call_timeout_s)

    def of(self, trainer: TrainingWorkers) -> GiveWeights:
        """Prepare to give the weights that the training engine has now, and as long as it is not trained."""
        if self.shared:
            return partial(self._stream, trainer)
        return partial(load_file, trainer.export_weights(str(self.directory / "policy.safetensors")))

    def _stream(self, trainer: TrainingWorkers, replicas: Sequence[WorkerGroup]) -> Given:
        path = str(self.directory / f"transfer-{next(self._numbers)}")
        stream = WeightStream(path, len(replicas), self.timeout_s)
        try:
            loads = [replica.submit("load_weights", stream.origin(place)) for place, replica in enumerate(replicas)]
            export = trainer.group.submit("export_weights", stream)
            calls = [export, *loads]
            # Without a sender nobody ends the readers' wait but the driver, which hears of it here.
            while not trainer.group.ended and (waiting := [call for call in calls if not call.done]):
                self.executor.wait(waiting)
                for place, replica in enumerate(replicas):
                    if replica.ended:
                        stream.withdraw(place)
            return Given(export.result()[0], _answers(loads))
        finally:
            stream.remove()


def load_file(manifest: WeightManifest, replicas: Sequence[WorkerGroup]) -> Given:
    """Give rollout processes the weights of a file."""
    loads = [replica.submit("load_weights", manifest) for replica in replicas]
    return Given(manifest.version, _answers(loads))


def _answers(loads: Sequence[Pending]) -> list[int | AnytronError]:
    answers: list[int | AnytronError] = []
    for load in loads:
        try:
            answers += load.result()
        except AnytronError as error:  # noqa: PERF203 - each engine has its own
            answers.append(error)
    return answers
