"""A run gets and loses replicas while it goes on, and learns the same."""

import os

import pytest

from anytron.base.errors import ConfigError, WorkerError
from anytron.cli import scale
from anytron.cli.scale import ask_for_replicas
from anytron.record.tracking.claim import REPLICAS
from anytron.record.tracking.record import RunRecord
from anytron.run.rollout.pool import RolloutPool
from anytron.run.rollout.scaling import Scaling
from anytron.workers.executor.local import LocalExecutor
from tests.core.run.trainer.disturbed_runs import comparable, lines

TOTAL = 6


@pytest.fixture
def scaled(new_run, tmp_path, monkeypatch):
    """Make a run that is asked for numbers of replicas, by the step after which it is asked."""
    sizes = []
    resize = RolloutPool.resize
    monkeypatch.setattr(RolloutPool, "resize", lambda pool, count: sizes.append(count) or resize(pool, count))

    def make(wishes, path="run", *, overwrite=False, **sections):
        trainer = {"total_steps": TOTAL, "output_dir": str(tmp_path / path), "overwrite": overwrite}
        run = new_run(trainer=trainer, **sections)
        step = run.progress.step

        def stepped(metrics):
            step(metrics)
            wish = wishes.get(metrics["step"])
            if callable(wish):
                wish()
            elif isinstance(wish, int):
                ask_for_replicas(tmp_path / path, wish)
            elif wish is not None:
                (tmp_path / path / REPLICAS).write_text(wish)

        run.progress.step = stepped
        run.sizes = sizes
        return run

    return make


@pytest.mark.parametrize("ahead", [0, 1])
def test_it_learns_as_a_run_does_whose_replicas_stay(scaled, undisturbed, tmp_path, ahead):
    rollout = {"samples_per_prompt": 8, "max_new_tokens": 3, "weights": "file", "max_staleness": ahead}
    run = scaled({1: 3, 3: 1, 4: 1, 5: 2}, rollout=rollout)
    run.train()

    assert run.sizes == [3, 1, 2]
    assert run.executor.started.count("rollout") == 1 + 2 + 1
    assert [note for note in run.progress.notes if note.startswith("rollout.replicas")] == [
        "rollout.replicas: 1 -> 3, which generate when their engines are built",
        "rollout.replicas: 3 -> 1",
        "rollout.replicas: 1 -> 2, which generate when their engines are built",
    ]
    metrics, samples, _ = undisturbed(TOTAL, rollout=rollout)
    assert lines(tmp_path / "run/samples.jsonl") == samples
    assert comparable(tmp_path / "run") == [pytest.approx(record, rel=1e-3, abs=1e-5) for record in metrics]


def test_what_cannot_be_had_is_a_warning_and_the_run_goes_on(scaled, monkeypatch):
    run = scaled({1: 9, 2: "many", 3: 2, 4: 4})
    started, start = [], run.executor.start

    def fails(spec):
        if spec.role == "rollout":
            started.append(spec.replicas)
            if len(started) == 4:
                raise WorkerError("A process could not be started.", why="the machine is full")
        return start(spec)

    run.executor.start = fails
    summary = run.train()

    assert summary.steps == TOTAL
    assert started == [1, 2, 4, 4]
    assert run.sizes == [2, 4, 2], "the one that had started has ended again"
    ours = [warning for warning in run.progress.warnings if warning.startswith("rollout.replicas")]
    assert ours[0] == "rollout.replicas stays 1: There are too few devices. there are 4"
    assert ours[1] == "rollout.replicas stays 1: The file replicas.wanted holds no number of replicas. it has 'many'"
    assert ours[2] == "rollout.replicas stays 2: A process could not be started. the machine is full"
    assert len(ours) == 3, "each is said once"


def big(path):
    path.write_text("1" * 10**6)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (big, "it has more than 20 bytes"),
        (lambda path: path.write_bytes(b"\xff\x00"), "holds no number of replicas"),
        (lambda path: path.write_text("-3"), "it has '-3'"),
        (lambda path: path.write_text("0"), "it has '0'"),
        (lambda path: path.write_text("65"), "a step has 64 ("),
        (lambda path: path.write_text("9" * 19), "a step has 64 ("),
        (os.mkfifo, None),
        (lambda path: path.mkdir(), None),
        (lambda path: path.symlink_to("/dev/zero"), None),
    ],
    ids=["large", "bytes", "negative", "zero", "too many", "far too many", "a pipe", "a directory", "a device"],
)
def test_whatever_stands_in_the_file_is_a_warning_and_said_once(new_run, tmp_path, write, why):
    said = []
    scaling = Scaling(tmp_path, None, None, new_run().config, said.append, said.append)
    write(tmp_path / REPLICAS)
    assert [scaling.follow(), scaling.follow()] == [False, False]
    assert len(said) == (why is not None)
    assert why is None or why in said[0]
    scaling.forget()
    assert not os.path.lexists(tmp_path / REPLICAS)


def other_configuration(patch):
    read = RunRecord.read
    patch.setattr(RunRecord, "read", lambda path: read(path).model_copy(update={"config": {"rollout": 7}}))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda patch: patch.setattr(scale, "generates_in_training", lambda _: True), "no rollout replicas"),
        (lambda patch: patch.setattr(scale, "REPLICAS", "no/such/folder"), "cannot be written"),
        (lambda patch: patch.setattr(scale, "most_replicas", lambda _: 2), "no work for 3 replicas"),
        (other_configuration, "This version of Anytron cannot read"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_words(scaled, tmp_path, monkeypatch, change, what):
    def ask():
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(ConfigError, match=what):
                ask_for_replicas(tmp_path / "run", 3)

    scaled({1: ask}).train()


def test_what_an_earlier_start_was_asked_for_is_forgotten(scaled, tmp_path):
    scaled({2: 3}).train()
    assert (tmp_path / "run" / REPLICAS).read_text() == "3\n"
    with pytest.raises(ConfigError, match="only while a run goes on") as caught:
        ask_for_replicas(tmp_path / "run", 2)
    assert "the run is finished" in caught.value.why
    assert "resume=auto rollout.replicas=2" in caught.value.fix

    again = scaled({}, overwrite=True)
    again.sizes.clear()
    again.train()
    assert again.sizes == []
    assert not (tmp_path / "run" / REPLICAS).exists()


def test_replicas_apart_need_a_device_each(new_run):
    run = new_run(rollout={"placement": "separate"}, parallel={"data_parallel_size": 2})
    executor = LocalExecutor.__new__(LocalExecutor)
    executor._config = run.config

    class Session:
        class probe:  # noqa: N801
            devices = 4

        class platform:  # noqa: N801
            name = "chip"

    executor._session = Session
    executor.require_replicas(2)
    with pytest.raises(ConfigError, match="too few devices for the replicas") as caught:
        executor.require_replicas(3)
    assert caught.value.why == "2 training ranks and 3 replicas need one device each, and the platform chip has 4"
    assert caught.value.fix == "set the number of replicas to at most 2"
