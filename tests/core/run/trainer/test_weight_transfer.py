"""Weights are given to rollout processes, whatever becomes of either side; real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from anytron.base.errors import ConfigError, EngineError, ProcessLost, TransferError, WorkerError
from anytron.device.loading import open_session
from anytron.run.preflight.capabilities import weight_diagnostics
from anytron.run.rollout.replica import WeightAnswers
from anytron.run.trainer import weight_transfer
from anytron.run.trainer.weight_transfer import WeightTransfer
from anytron.workers.executor.local import THIS_MACHINE, LocalExecutor
from anytron.workers.executor.protocol import Host
from anytron.workers.weights.memory import SharedMemory
from tests.core.run.trainer.transfers import Started, install, transfer_config, watch_meetings
from tests.listening import check
from tests.slow import slow_but


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patches:
        install(tmp_path_factory.mktemp("installed"), patches)
        yield


@pytest.fixture
def config(installed, tmp_path):
    return transfer_config(tmp_path)


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


def test_buckets_are_as_large_as_the_last_weights_need(started, monkeypatch):
    sizes, stream = [], weight_transfer.WeightStream
    monkeypatch.setattr(weight_transfer, "WeightStream", lambda *given: sizes.append(given[-1]) or stream(*given))
    started.transfer = replace(started.transfer, part="adapter")
    assert [started.give() for _ in range(3)] == [1, 2, 3]
    assert sizes == [16 << 20, 2048, 2048], "the adapter has 1024 bytes"
    assert started.pool.describe() == [(3, {"factor": 3.0})] * 2


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("way", "sizes"), [("shared_memory", [1024]), ("network", [1024]), ("file", range(1025, 2048))]
)
def test_an_adapter_goes_alone_and_what_is_sent_is_counted(started, way, sizes, tmp_path, monkeypatch):
    """A file has a table of its tensors besides."""
    seen = watch_meetings(monkeypatch, tmp_path)
    started.transfer = replace(started.transfer, way=way, part="adapter")
    assert started.give() == 1
    assert started.pool.describe() == [(1, {"factor": 1.0})] * 2
    sent = started.transfer.metrics["throughput/weight_bytes"]
    assert sent in sizes
    os.kill(started.pids()[0], signal.SIGKILL)
    assert started.pool.describe() == [(1, {"factor": 1.0})] * 2
    assert started.transfer.metrics["throughput/weight_bytes"] == 2 * sent  # its successor was given the same once more
    if way == "network":
        check("one machine, `rollout.weights: network`", seen)
    else:
        assert not seen


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("way", "fate", "where"),
    [
        pytest.param("shared_memory", "dies", "before", marks=pytest.mark.slow),
        pytest.param("shared_memory", "stops", "midway", marks=pytest.mark.slow),
        ("network", "stops", "before"),
        ("network", "dies", "midway"),
    ],
)
def test_a_process_that_is_lost_in_a_transfer_is_replaced_and_the_other_gets_its_weights(
    started, tmp_path, way, fate, where
):
    started.transfer = replace(started.transfer, way=way)
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
    assert [error.what.partition(" returned ")[2] for error in started.losses] == ["an invalid result."]


def test_a_process_that_is_lost_later_gets_the_same_weights_again(started):
    started.give()
    os.kill(started.pids()[0], signal.SIGKILL)
    assert started.pool.describe() == [(1, [1.0])] * 2
    assert len(started.losses) == 1


@pytest.mark.some(1)
@pytest.mark.parametrize("way", slow_but(["shared_memory", "network", "file"], "network"))
def test_a_process_that_holds_other_weights_than_were_exported_is_replaced(started, tmp_path, way):
    started.transfer = replace(started.transfer, way=way)
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


@pytest.mark.parametrize("way", ["shared_memory", "network"])
def test_the_loss_of_the_sender_is_told_as_such(started, tmp_path, way):
    started.transfer = replace(started.transfer, way=way)
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
        return WeightAnswers(given.version, [failures.pop(0), *given.answers[1:]])

    started.pool.load_weights(give)
    assert [error.what for error in started.losses] == ["damaged"]
    with pytest.raises(EngineError, match="unknown"):
        until_the_new_process_has_weights(started.pool)


def until_the_new_process_has_weights(pool):
    """Nothing waits for it while another replica is there; the test's time limit ends this."""
    while True:
        pool.poll(0.1)


A, B, C = (Host(name, f"10.0.0.{number}") for number, name in enumerate("abc", 1))


@pytest.mark.parametrize(
    ("driver", "sender", "readers", "listening", "told"),
    [
        (A, A, [A, A], None, "through shared memory"),
        (A, A, [A, B], ("127.0.0.1", A.address), "over the network: a rollout process is at 10.0.0.2, and rank 0 at"),
        (A, B, [B, B], (A.address, "127.0.0.1"), "over the network: the driver is at 10.0.0.1, and rank 0 at 10.0.0.2"),
        (A, B, [C], (A.address, B.address), "over the network: the driver is at 10.0.0.1"),
    ],
)
def test_auto_shares_memory_on_one_machine_and_listens_at_no_more_addresses_than_it_must(
    config, tmp_path, monkeypatch, driver, sender, readers, listening, told
):
    monkeypatch.setattr(weight_transfer, "NetworkMeeting", lambda driver, sender: (driver, sender))
    notes = []
    transfer = WeightTransfer.from_config(config, SimpleNamespace(host=driver), tmp_path, notes.append)
    trainer, *replicas = [SimpleNamespace(hosts=[host]) for host in (sender, *readers)]
    for _ in range(2):
        meeting = transfer._meeting(trainer, replicas)
    assert meeting == (SharedMemory(str(tmp_path / "transfer-1")) if listening is None else listening)
    (note,) = notes
    assert note.startswith(f"weights go to the rollout {told}")
    assert replace(transfer, way="network")._meeting(trainer, [trainer])[1] == "127.0.0.1"


def test_memory_that_cannot_be_shared_is_an_error_if_it_must_be(config, tmp_path):
    must = config.model_copy(update={"rollout": config.rollout.model_copy(update={"weights": "shared_memory"})})
    transfer = WeightTransfer.from_config(must, SimpleNamespace(host=A), tmp_path, print)
    here, there = SimpleNamespace(hosts=[A]), SimpleNamespace(hosts=[B])
    assert transfer._meeting(here, [here]) == SharedMemory(str(tmp_path / "transfer-0"))
    with pytest.raises(ConfigError, match=r"(?s)through shared memory.*a rollout process is at 10.0.0.2"):
        transfer._meeting(here, [here, there])


def test_an_engine_that_takes_a_file_only_gets_one_and_is_told_of_before(config, tmp_path):
    def diagnosed(**rollout):
        changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
        notes = []
        transfer = WeightTransfer.from_config(changed, SimpleNamespace(host=THIS_MACHINE), tmp_path, notes.append)
        assert transfer.part == ("adapter" if rollout.get("lora") == "alone" else "weights")
        return transfer.way, notes, [(one.severity, one.key) for one in weight_diagnostics(changed)]

    assert diagnosed() == ("auto", [], [])
    assert diagnosed(weights="file") == ("file", [], [])
    assert diagnosed(lora="alone") == ("auto", [], [])
    way, (note,), found = diagnosed(engine="reading")
    assert (way, found) == ("file", [])
    assert note == "weights go to the rollout through a file: the engine reading loads weights only from a file"
    for must in ("shared_memory", "network"):
        assert diagnosed(engine="reading", weights=must)[2] == [("error", "rollout.weights")]
