"""Send the training engine's weights, or its adapters alone, to rollout processes.

The weights go on a stream or through a file; if the training ranks generate, nothing is sent.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from anytron.base.errors import AnytronError, ConfigError, TransferError
from anytron.run.preflight.capabilities import why_a_file
from anytron.run.rollout.replica import WeightAnswers
from anytron.workers.engines.rollout_engine import AdapterRollout, ComparableRollout, RolloutEngine
from anytron.workers.engines.training_engine import AdapterEngine, TrainingEngine
from anytron.workers.executor.protocol import submit
from anytron.workers.weights.memory import SharedMemory
from anytron.workers.weights.network import LOOPBACK, NetworkMeeting
from anytron.workers.weights.stream import BUCKET_BYTES, WeightStream, bucket_bytes_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Clock
    from anytron.run.rollout.replica import GiveWeights
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.workers.executor.protocol import Executor, Pending, WorkerGroup
    from anytron.workers.weights.buckets import Meeting
    from anytron.workers.weights.stream import StreamedWeights
    from anytron.workers.weights.transfer import WeightDestination, WeightManifest, WeightOrigin, WeightPart

    Take = Callable[[Any, WeightOrigin], "Answer"]
    """A method of rollout engines that takes weights from an origin."""

Answer = TypeVar("Answer")

EXPORTS: Mapping[WeightPart, Callable[[Any, WeightDestination[StreamedWeights]], StreamedWeights | None]] = {
    "weights": TrainingEngine.export_weights,
    "adapter": AdapterEngine.export_adapter,
}
LOADS: Mapping[WeightPart, Take[int]] = {
    "weights": RolloutEngine.load_weights,
    "adapter": AdapterRollout.load_adapter,
}


class Send(Protocol):
    """Calls a method of rollout processes with an object from which they can read the weights."""

    def __call__(
        self, method: Take[Answer], replicas: Sequence[WorkerGroup], /
    ) -> tuple[int, list[Answer | AnytronError]]:
        """Return the version of the weights, and the answer of each rollout process, or its error."""


@dataclass(frozen=True)
class WeightTransfer:
    """Sends the weights of a run to its rollout processes in the configured way.

    Attributes:
        executor: Runs the training ranks and the rollout processes.
        directory: Directory for the file or the sockets, accessible to this user only.
        way: ``shared_memory``, ``network``, ``file``; or ``auto``, which selects one of the first two, depending on
            the machines of the receivers.
        timeout_s: Seconds that the sender and the receivers wait for each other.
        tell: Called with the way that ``auto`` selected, and the reason.
        part: The part of the weights that changes and is sent.
        metrics: The bytes that were sent since :meth:`of`, counted once for any number of rollout processes.
    """

    executor: Executor
    directory: Path
    way: str
    timeout_s: float
    tell: Callable[[str], None]
    part: WeightPart
    metrics: dict[str, float] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _told: set[str] = field(default_factory=set)
    _last_bytes: deque[int] = field(default_factory=partial(deque, maxlen=1))

    @classmethod
    def from_config(
        cls, config: RunConfig, executor: Executor, directory: Path, tell: Callable[[str], None]
    ) -> WeightTransfer:
        """Make the transfer that ``rollout.weights`` selects."""
        way = config.rollout.weights
        if way == "auto" and (reason := why_a_file(config)) is not None:
            tell(f"weights go to the rollout through a file: {reason}")
            way = "file"
        part: WeightPart = "adapter" if config.rollout.lora == "alone" else "weights"
        return cls(executor, directory, way, config.executor.call_timeout_s, tell, part)

    def of(self, trainer: TrainingWorkers, *, compared: bool) -> GiveWeights:
        """Prepare to send the current weights of the training engine; valid until the next update.

        Args:
            trainer: The training engine, which exports the weights.
            compared: Whether to send the weights a second time, to compare them with the weights of the rollout
                processes. A process whose weights differ counts as one that did not receive them.
        """
        self.metrics["throughput/weight_bytes"] = 0.0
        if self.way == "file":
            file = str(self.directory / "policy.safetensors")
            send = partial(self._send_file, trainer.export_weights(file, self.part))
        else:
            send = partial(self._stream, trainer)
        return partial(load_and_compare if compared else load, send, self.part)

    @staticmethod
    def measured(clock: Clock) -> contextlib.AbstractContextManager[None]:
        """Measure the exchange as a part of the step."""
        return clock.measure("sync")

    def _stream(
        self, trainer: TrainingWorkers, method: Take[Answer], replicas: Sequence[WorkerGroup]
    ) -> tuple[int, list[Answer | AnytronError]]:
        with self._meeting(trainer.group, replicas) as meeting:
            bucket_bytes = bucket_bytes_for(self._last_bytes[0]) if self._last_bytes else BUCKET_BYTES
            stream = WeightStream(meeting.sender, len(replicas), self.timeout_s, bucket_bytes)
            export = submit(trainer.group, EXPORTS[self.part], stream)
            while (carrier := meeting.reader()) is None:
                if self.executor.wait([export], 0.0):
                    export.result()
            calls = [submit(replica, method, stream.origin(carrier, place)) for place, replica in enumerate(replicas)]
            # Without a sender nobody ends the readers' wait but the driver, which hears of it here.
            waiting: dict[int, Pending] = dict(enumerate(calls))
            while not trainer.group.ended and (waiting or not export.done):
                self.executor.wait([call for call in (export, *waiting.values()) if not call.done])
                for place in [place for place, call in waiting.items() if call.done]:
                    # Whether it came or not, it will not come now.
                    meeting.withdraw(place, lost=isinstance(_answer(waiting.pop(place)), AnytronError))
            sent = export.result()[0]
            assert sent is not None, "rank 0 says what it has sent"
            self.metrics["throughput/weight_bytes"] += sent.num_bytes
            self._last_bytes.append(sent.num_bytes)
            return sent.version, [_answer(call) for call in calls]

    def _send_file(
        self, manifest: WeightManifest, method: Take[Answer], replicas: Sequence[WorkerGroup]
    ) -> tuple[int, list[Answer | AnytronError]]:
        self.metrics["throughput/weight_bytes"] += manifest.num_bytes
        return send_file(manifest, method, replicas)

    def _meeting(self, trainer: WorkerGroup, replicas: Sequence[WorkerGroup]) -> Meeting:
        """Connect rank 0 with rollout processes in the configured way; ``auto`` chooses it by their machines."""
        driver, sender, readers = self.executor.host, trainer.hosts[0], [replica.hosts[0] for replica in replicas]
        apart = next(
            (
                f"{name} is at {host.address}, and rank 0 at {sender.address}"
                for name, host in [("the driver", driver), *(("a rollout process", reader) for reader in readers)]
                if host.id != sender.id
            ),
            None,
        )
        way = self.way
        if way == "auto":
            way = "shared_memory" if apart is None else "network"
            self._tell_once("through shared memory" if apart is None else f"over the network: {apart}")
        if way == "network":
            reached = {reader.id for reader in readers} <= {sender.id}
            return NetworkMeeting(
                driver=LOOPBACK if driver.id == sender.id else driver.address,
                sender=LOOPBACK if reached else sender.address,
            )
        if apart is not None:
            raise ConfigError(
                "Weights cannot go through shared memory.",
                where="rollout.weights=shared_memory",
                why=f"shared memory works on one machine only, but {apart}",
                fix="set rollout.weights=auto",
            )
        return SharedMemory(str(self.directory / f"transfer-{next(self._numbers)}"))

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.tell(f"weights go to the rollout {what}")


class WeightsInPlace:
    """No transfer: the training ranks generate with the weights that they hold."""

    metrics: ClassVar[Mapping[str, float]] = {}

    @staticmethod
    def of(trainer: TrainingWorkers, *, compared: bool) -> GiveWeights:
        """Return a function that reports the weights' current version for all replicas; ``compared`` must be False."""
        assert not compared, "there is nothing to compare them with"
        version = trainer.weights_version()
        return lambda replicas: WeightAnswers(version, [version] * len(replicas))

    @staticmethod
    def measured(clock: Clock) -> contextlib.AbstractContextManager[None]:
        """Measure nothing, because no weights are sent."""
        del clock
        return contextlib.nullcontext()


def send_file(
    manifest: WeightManifest, method: Take[Answer], replicas: Sequence[WorkerGroup]
) -> tuple[int, list[Answer | AnytronError]]:
    """Call a method of rollout processes with weights in a file; the result is that of :class:`Send`."""
    calls = [submit(replica, method, manifest) for replica in replicas]
    return manifest.version, [_answer(call) for call in calls]


def _answer(call: Pending[Answer]) -> Answer | AnytronError:
    """Wait for the answer of an engine: what it returned, or the error that ended it."""
    try:
        return call.result()[0]
    except AnytronError as error:
        return error


def load(send: Send, part: WeightPart, replicas: Sequence[WorkerGroup]) -> WeightAnswers:
    """Let rollout processes load the weights that ``send`` sends."""
    return WeightAnswers(*send(LOADS[part], replicas))


def load_and_compare(send: Send, part: WeightPart, replicas: Sequence[WorkerGroup]) -> WeightAnswers:
    """Let rollout processes load weights, then send the weights again to compare them with the loaded ones."""
    given = load(send, part, replicas)
    places = [place for place, answer in enumerate(given.answers) if answer == given.version]
    if not places:
        return given
    _, found = send(ComparableRollout.differing_weights, [replicas[place] for place in places])
    answers = list(given.answers)
    for place, differing in zip(places, found, strict=True):
        if isinstance(differing, AnytronError):
            answers[place] = differing
        elif differing:
            answers[place] = TransferError(
                "A rollout process does not hold the weights that were exported.",
                where=f"{differing[0]}, version {given.version}",
                why=f"{len(differing)} weights of the rollout process differ from the exported weights",
                fix="if this happens again, check the device's memory, or report a bug of the rollout engine",
            )
    return replace(given, answers=answers)
