"""Weights are given to rollout processes through shared memory, whatever becomes of either side; real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from anytron.config.schema import RunConfig
from anytron.errors import EngineError, ProcessLost, TransferError, WorkerError
from anytron.executor.local import LocalExecutor
from anytron.plugins import open_session
from anytron.preflight.capabilities import weight_diagnostics
from anytron.rollout.pool import Given, RolloutPool
from anytron.trainer.weight_transfer import WeightTransfer
from anytron.trainer.workers import TrainingWorkers

ENGINES = '''
import os, signal, time
import torch
from anytron.components import EngineInfo
from anytron.engines.training_engine import Topology

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
            if os.path.exists(path):
                os.unlink(path)
                if fate == "fails":
                    return True
                if fate == "raises":
                    raise ValueError("it does not want them")
                os.kill(os.getpid(), signal.SIGKILL if fate == "dies" else signal.SIGSTOP)
    def describe(self):
        return self.loaded

TRAINER, ROLLOUT = EngineInfo("transfer_engines:Trainer"), EngineInfo("transfer_engines:Rollout", takes_stream=True)
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "transfer_engines-1.0.dist-info"
    metadata.mkdir()
    (folder / "transfer_engines.py").write_text(ENGINES)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transfer-engines\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[anytron.training_engines]\nsending = transfer_engines:TRAINER\n"
        "[anytron.rollout_engines]\ntaking = transfer_engines:ROLLOUT\n"
    )
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(str(folder))
        yield


class Started:
    """Both engines, and how weights get from one to the other."""

    def __init__(self, executor, config, directory):
        self.directory, self.notes, self.losses = directory, [], []
        self.trainer = TrainingWorkers.of(executor.start("trainer", "anytron.training_engines", "sending", 1, 1))
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


@pytest.fixture
def config(installed, tmp_path):
    return RunConfig.model_validate(
        {
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
            "model": {"path": "unused"},
            "engine": {"name": "sending"},
            "rollout": {"engine": "taking", "replicas": 2, "num_threads": 1},
            "executor": {"heartbeat_timeout_s": 2},
            "trainer": {"output_dir": str(tmp_path)},
        }
    )


@pytest.fixture
def started(config, tmp_path):
    (tmp_path / "exchange").mkdir()
    with LocalExecutor(config, open_session(platform="cpu")) as executor:
        yield Started(executor, config, tmp_path / "exchange")
        executor.end()


def test_each_version_arrives_everywhere_and_leaves_nothing_behind(started):
    assert [started.give() for _ in range(2)] == [1, 2]
    assert started.pool.describe() == [(2, [2.0])] * 2
    assert started.notes == ["weights go to the rollout through shared memory"]
    assert started.transfer.metrics == {"throughput/weight_bytes": 12 * (8 << 20)}  # of the last one
    assert started.rest() == []


@pytest.mark.parametrize(("way", "sizes"), [("shared_memory", [1024]), ("file", range(1025, 2048))])
def test_an_adapter_goes_alone_and_what_is_sent_is_counted(started, way, sizes):
    """A file has a table of its tensors besides."""
    started.transfer = replace(started.transfer, shared=way == "shared_memory", part="adapter")
    assert started.give() == 1
    assert started.pool.describe() == [(1, {"factor": 1.0})] * 2
    sent = started.transfer.metrics["throughput/weight_bytes"]
    assert sent in sizes
    os.kill(started.pids()[0], signal.SIGKILL)
    assert started.pool.describe() == [(1, {"factor": 1.0})] * 2
    assert started.transfer.metrics["throughput/weight_bytes"] == 2 * sent  # its successor was given the same once more


@pytest.mark.parametrize("where", ["before", "midway"])
@pytest.mark.parametrize("fate", ["dies", "stops"])
def test_a_process_that_is_lost_in_a_transfer_is_replaced_and_the_other_gets_its_weights(
    started, tmp_path, fate, where
):
    started.give()
    before = started.pids()
    (tmp_path / f"rollout-{fate}-{where}").touch()  # of the two, one finds it and deletes it
    assert started.give() == 2
    assert started.pool.describe() == [(2, [2.0])] * 2
    assert [type(error) for error in started.losses] == [ProcessLost]
    assert len(set(before) & set(started.pids())) == 1
    assert started.rest() == []


def test_an_engine_that_answers_without_having_come_holds_up_nobody_and_is_replaced(started, tmp_path):
    (tmp_path / "rollout-fails-before").touch()
    assert started.give() == 1
    assert started.pool.describe() == [(1, [1.0])] * 2
    assert [error.what[-17:] for error in started.losses] == ["answered wrongly."]


def test_a_process_that_is_lost_later_gets_the_same_weights_again(started):
    started.give()
    os.kill(started.pids()[0], signal.SIGKILL)
    assert started.pool.describe() == [(1, [1.0])] * 2
    assert len(started.losses) == 1


@pytest.mark.parametrize("way", ["shared_memory", "file"])
def test_a_process_that_holds_other_weights_than_were_exported_is_replaced(started, tmp_path, way):
    started.transfer = replace(started.transfer, shared=way == "shared_memory")
    (tmp_path / "rollout-fails-afterwards").touch()
    before = started.pids()
    assert started.give(compared=True) == 1
    (loss,) = started.losses
    assert loss.what == "A rollout process does not hold the weights that were exported."
    assert loss.where == "weight.3, version 1"
    assert len(set(before) & set(started.pids())) == 1
    assert started.pool.describe() == [(1, [1.0])] * 2
    (tmp_path / "rollout-dies-afterwards").touch()
    assert started.give(compared=True) == 2
    assert [type(error) for error in started.losses[1:]] == [ProcessLost]


def test_the_loss_of_the_sender_is_told_as_such(started, tmp_path):
    started.give()
    (tmp_path / "trainer-dies").touch()
    with pytest.raises(ProcessLost, match=r"Trainer rank 0 failed in export_weights"):
        started.give()
    assert started.losses == []
    assert started.rest() == []


def test_an_engine_that_raises_ends_the_run(started, tmp_path):
    (tmp_path / "rollout-raises-midway").touch()
    with pytest.raises(WorkerError, match=r"(?s)failed in load_weights.*it does not want them"):
        started.give()
    assert started.losses == []


def test_weights_that_did_not_arrive_are_given_again_and_those_that_do_not_fit_are_not(started):
    started.give()
    real, failures = (
        started.transfer.of(started.trainer, compared=False),
        [TransferError("damaged"), EngineError("unknown")],
    )

    def give(groups):
        given = real(groups)
        return Given(given.version, [failures.pop(0), *given.answers[1:]])

    with pytest.raises(EngineError, match="unknown"):
        started.pool.load_weights(give)
    assert [error.what for error in started.losses] == ["damaged"]


def test_what_auto_chooses_and_what_is_refused(config, tmp_path):
    def told(executor, **rollout):
        changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
        notes = []
        transfer = WeightTransfer.from_config(changed, executor, tmp_path, notes.append)
        return transfer.shared, notes, list(weight_diagnostics(changed, on_this_machine=executor.on_this_machine))

    here, elsewhere = SimpleNamespace(on_this_machine=True), SimpleNamespace(on_this_machine=False)
    assert told(here) == (True, ["weights go to the rollout through shared memory"], [])
    shared, (note,), found = told(elsewhere)
    assert (shared, found) == (False, [])
    assert "through a file: processes of executor.kind=local may be on several machines" in note
    assert told(here, weights="file") == (False, [], [])
    assert WeightTransfer.from_config(config, here, tmp_path, [].append).part == "weights"
    alone = config.model_copy(update={"rollout": config.rollout.model_copy(update={"lora": "alone"})})
    assert WeightTransfer.from_config(alone, here, tmp_path, [].append).part == "adapter"
    (refused,) = told(elsewhere, weights="shared_memory")[2]
    assert (refused.severity, refused.key) == ("error", "rollout.weights")
