"""Small engines that send and take weights, installed for a test, and both of them started."""

from __future__ import annotations

import os

from anytron.config.schema import RunConfig
from anytron.run.rollout.pool import RolloutPool
from anytron.run.trainer.weight_transfer import WeightTransfer
from anytron.run.trainer.workers import TrainingWorkers
from anytron.workers.executor.protocol import GroupSpec
from anytron.workers.weights.network import NetworkMeeting
from tests.core.workers.executor.processes import listeners
from tests.listening import described, of_run

ENGINES = '''
import os, signal, time
import torch
from anytron.base.components import EngineInfo
from anytron.workers.engines.training_engine import Topology

class Trainer:
    """Exports tensors of the version's number; dies or raises when a file says so."""
    def __init__(self, context):
        self.version, self.directory = 0, context.config.trainer.output_dir
    def topology(self):
        return Topology(dp_rank=0, dp_size=1, reports=True)
    def step(self):
        self.version += 1
    def pid(self):
        return os.getpid()
    def export_weights(self, destination):
        return destination.send(self.weights(), self.version, lambda name: False)
    def export_adapter(self, destination):
        return destination.send([("factor", torch.full((256,), float(self.version)))], self.version, lambda name: False)
    def weights(self):
        for number in range(12):
            if number == 8 and os.path.exists(self.directory + "/trainer-dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            yield f"weight.{number}", torch.full((2 << 20,), float(self.version))  # 8 MiB: two make a bucket

class Rollout:
    """Notes the versions of what it was given; fails when a file says so, and deletes the file."""
    def __init__(self, context):
        self.directory, self.loaded = context.config.trainer.output_dir, None
    def load_weights(self, origin):
        if self.meet("before"):
            return 0
        with origin.open() as weights:
            values = set()
            for place, piece in enumerate(weights):
                if place == 6:
                    self.meet("midway")
                values |= set(piece.values[:: 1 << 19].tolist())
            self.loaded = (weights.version, sorted(values))
        return weights.version
    def load_adapter(self, origin):
        with origin.open() as adapter:
            self.loaded = (adapter.version, {piece.name: piece.values.tolist()[0] for piece in adapter})
        return adapter.version
    def differing_weights(self, origin):
        differs = self.meet("afterwards")
        with origin.open() as weights:
            held = (weights.version, sorted({float(piece.values[0]) for piece in weights}))
        return ["weight.3"] if differs or held != self.loaded else []
    def meet(self, where):
        for fate in ("dies", "stops", "raises", "fails"):
            path = f"{self.directory}/rollout-{fate}-{where}"
            try:
                os.unlink(path)  # by one of both
            except FileNotFoundError:
                continue
            if fate == "fails":
                return True
            if fate == "raises":
                raise ValueError("it does not want them")
            os.kill(os.getpid(), signal.SIGKILL if fate == "dies" else signal.SIGSTOP)
    def describe(self):
        return self.loaded

TRAINER, ROLLOUT = EngineInfo("transfer_engines:Trainer"), EngineInfo("transfer_engines:Rollout", takes_stream=True)
READING = EngineInfo("transfer_engines:Rollout")
'''


def install(folder, patches):
    """Make the engines known to this process and to its workers."""
    metadata = folder / "transfer_engines-1.0.dist-info"
    metadata.mkdir()
    (folder / "transfer_engines.py").write_text(ENGINES)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transfer-engines\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[anytron.training_engines]\nsending = transfer_engines:TRAINER\n"
        "[anytron.rollout_engines]\ntaking = transfer_engines:ROLLOUT\nreading = transfer_engines:READING\n"
    )
    patches.syspath_prepend(str(folder))


def transfer_config(output, **sections) -> RunConfig:
    """A run of both engines."""
    return RunConfig.model_validate(
        {
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
            "model": {"path": "unused"},
            "engine": {"name": "sending"},
            "rollout": {"engine": "taking", "replicas": 2, "num_threads": 1},
            "executor": {"heartbeat_timeout_s": 2},
            "trainer": {"output_dir": str(output)},
            **sections,
        }
    )


def watch_meetings(monkeypatch, output, own=None):
    """Give a set that has, after transfers over the network, what driver and rank 0 were found to listen on.

    The driver looks while it waits for rank 0, and when rank 0 waits for readers, who have not been told yet.

    Args:
        monkeypatch: Of the test.
        output: The run's directory.
        own: The machine's address in the cluster.
    """
    seen, before, reader = set(), listeners(os.getpid()), NetworkMeeting.reader

    def look():
        seen.update(described(of_run(os.getpid(), output), own, before))

    def watching(meeting):
        look()
        found = reader(meeting)
        if found is not None:
            look()
        return found

    monkeypatch.setattr(NetworkMeeting, "reader", watching)
    return seen


class Started:
    """Both engines, and how weights get from one to the other."""

    def __init__(self, executor, config, directory):
        self.directory, self.notes, self.losses = directory, [], []
        self.trainer = TrainingWorkers.of(
            executor.start(GroupSpec("trainer", "anytron.training_engines", "sending", 1, 1))
        )
        self.pool = RolloutPool(executor, config.rollout, lambda error, then: self.losses.append(error))
        self.transfer = WeightTransfer.from_config(config, executor, directory, self.notes.append)

    def give(self, *, compared=False):
        self.trainer.group.call("step")
        return self.pool.load_weights(self.transfer.of(self.trainer, compared=compared))

    def pids(self):
        return [replica.group._ranks[0].pid for replica in self.pool._replicas]

    def rest(self):
        """What the transfers left in their directory."""
        return sorted(path.name for path in self.directory.iterdir())
