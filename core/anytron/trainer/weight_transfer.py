"""Give rollout processes the training engine's weights, or its adapters alone.

They go through shared memory, through a file, or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from anytron.engines.weight_stream import WeightStream
from anytron.errors import AnytronError, TransferError
from anytron.preflight.capabilities import why_not_shared
from anytron.rollout.pool import Given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.engines.weight_stream import StreamedWeights
    from anytron.engines.weights import WeightManifest, WeightPart
    from anytron.executor.protocol import Executor, Pending, WorkerGroup
    from anytron.rollout.pool import GiveWeights
    from anytron.tracking.clock import Clock
    from anytron.trainer.workers import TrainingWorkers

    Sent = tuple[int, list[Any]]
    """Version of the weights that were sent, and what each rollout process answered, or its error."""
    Send = Callable[[str, Sequence[WorkerGroup]], Sent]
    """Calls a method of rollout processes with an origin of the weights."""


@dataclass(frozen=True)
class WeightTransfer:
    """The way that a run's weights take.

    Attributes:
        executor: Runs the training ranks and the rollout processes.
        directory: For the file or the sockets, of this user alone.
        shared: Through shared memory.
        timeout_s: How long one end waits for the other.
        part: Which part of the weights changes, and is sent.
        metrics: The bytes that were sent since :meth:`of`, however many rollout processes they went to.
    """

    executor: Executor
    directory: Path
    shared: bool
    timeout_s: float
    part: WeightPart
    metrics: dict[str, float] = field(default_factory=dict)
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
        part: WeightPart = "adapter" if config.rollout.lora == "alone" else "weights"
        return cls(executor, directory, shared, config.executor.call_timeout_s, part)

    def of(self, trainer: TrainingWorkers, *, compared: bool) -> GiveWeights:
        """Prepare to give the weights that the training engine has now, and as long as it is not trained.

        Args:
            trainer: Exports them.
            compared: Then send them again, to compare them with what the rollout processes hold. One that holds others
                did not get its weights.
        """
        self.metrics["throughput/weight_bytes"] = 0.0
        if self.shared:
            send = partial(self._stream, trainer)
        else:
            file = str(self.directory / "policy.safetensors")
            send = partial(self._send_file, trainer.export_weights(file, self.part))
        return partial(load_and_compare if compared else load, send, self.part)

    @staticmethod
    def measured(clock: Clock) -> contextlib.AbstractContextManager[None]:
        """Measure the exchange as a part of the step."""
        return clock.measure("sync")

    def _stream(self, trainer: TrainingWorkers, method: str, replicas: Sequence[WorkerGroup]) -> Sent:
        path = str(self.directory / f"transfer-{next(self._numbers)}")
        stream = WeightStream(path, len(replicas), self.timeout_s)
        try:
            calls = [replica.submit(method, stream.origin(place)) for place, replica in enumerate(replicas)]
            export = trainer.group.submit(f"export_{self.part}", stream)
            # Without a sender nobody ends the readers' wait but the driver, which hears of it here.
            while not trainer.group.ended and (waiting := [call for call in (export, *calls) if not call.done]):
                self.executor.wait(waiting)
                for place, call in enumerate(calls):
                    if call.done:  # whether it came or not, it will not come now
                        stream.withdraw(place)
            sent: StreamedWeights = export.result()[0]
            self.metrics["throughput/weight_bytes"] += sent.num_bytes
            return sent.version, _answers(calls)
        finally:
            stream.remove()

    def _send_file(self, manifest: WeightManifest, method: str, replicas: Sequence[WorkerGroup]) -> Sent:
        self.metrics["throughput/weight_bytes"] += manifest.num_bytes
        return manifest.version, _answers([replica.submit(method, manifest) for replica in replicas])


class WeightsInPlace:
    """No way at all: the training ranks generate with the weights that they have."""

    metrics: ClassVar[Mapping[str, float]] = {}

    @staticmethod
    def of(trainer: TrainingWorkers, *, compared: bool) -> GiveWeights:
        """Prepare to say which weights these are."""
        assert not compared, "there is nothing to compare them with"
        version = trainer.weights_version()
        return lambda replicas: Given(version, [version] * len(replicas))

    @staticmethod
    def measured(clock: Clock) -> contextlib.AbstractContextManager[None]:
        """Measure nothing: there is no exchange."""
        del clock
        return contextlib.nullcontext()


def _answers(calls: Sequence[Pending]) -> list[Any]:
    """Wait for one answer of each engine: what it returned, or the error that ended it."""
    answers: list[Any] = []
    for call in calls:
        try:
            answers += call.result()
        except AnytronError as error:  # noqa: PERF203 - each engine has its own
            answers.append(error)
    return answers


def load(send: Send, part: WeightPart, replicas: Sequence[WorkerGroup]) -> Given:
    """Let rollout processes load what is sent."""
    return Given(*send(f"load_{part}", replicas))


def load_and_compare(send: Send, part: WeightPart, replicas: Sequence[WorkerGroup]) -> Given:
    """Let rollout processes load what is sent, then compare what they hold with what is sent again."""
    given = load(send, part, replicas)
    places = [place for place, answer in enumerate(given.answers) if answer == given.version]
    _, found = send("differing_weights", [replicas[place] for place in places])
    answers = list(given.answers)
    for place, differing in zip(places, found, strict=True):
        if isinstance(differing, AnytronError):
            answers[place] = differing
        elif differing:
            answers[place] = TransferError(
                "A rollout process does not hold the weights that were exported.",
                where=f"{differing[0]}, version {given.version}",
                why=f"{len(differing)} of its weights differ",
                fix="if it happens again, the rollout engine has a bug, or the memory of its device is faulty",
            )
    return replace(given, answers=answers)
