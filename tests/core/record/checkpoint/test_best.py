"""The best checkpoint is marked by a file, kept when others are deleted, and found by it."""

from __future__ import annotations

import json

import pytest

from anytron.base.errors import CheckpointError
from anytron.record.checkpoint.directory import BEST, Best, CheckpointDirectory, locate
from anytron.record.checkpoint.manifest import DriverState, FileRecord, SourceState


def mark(step, value=0.5):
    return Best(step=step, metric="validation/a/mean@4", direction="max", value=value)


@pytest.fixture
def directory(tmp_path):
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (10, 20, 30, 40):
        complete(directory, step)
    return directory


def complete(directory, step):
    training = directory.begin(step)
    (training / "state").write_bytes(b"state")
    sampler = SourceState(epoch=0, position=step, prompts=99)
    state = DriverState(step=step, sampler=(sampler,), weights_version=step, config={})
    directory.commit(state, {"state": FileRecord.of(training / "state")})


def steps(directory):
    return [checkpoint.step for checkpoint in directory.complete()]


def test_the_best_stays_when_others_go_and_goes_when_another_is_best(directory):
    mark(20).write(directory.path)
    directory.prune(1)
    assert steps(directory) == [20, 40]
    mark(40).write(directory.path)
    directory.prune(1)
    assert steps(directory) == [40]


def test_without_a_mark_the_newest_are_kept(directory):
    assert directory.best() is None
    directory.prune(2)
    assert steps(directory) == [30, 40]


def test_it_is_found_by_its_file(directory):
    mark(20, 0.75).write(directory.path)
    found, checkpoint = directory.best()
    assert (found.value, checkpoint.step) == (0.75, 20)
    assert locate(directory.path / BEST) == checkpoint
    assert locate(directory.path).step == 40
    checkpoint.verify()


def test_a_mark_of_a_checkpoint_that_is_gone_is_no_mark_and_the_next_start_deletes_it(directory):
    mark(50).write(directory.path)
    assert directory.best() is None
    with pytest.raises(CheckpointError, match="missing or incomplete"):
        locate(directory.path / BEST)
    directory.sweep(lambda text: None)
    assert not (directory.path / BEST).exists()
    complete(directory, 50)
    assert directory.best() is None, "a checkpoint of the same step, of another run"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", json.dumps({"step": 20}), json.dumps(mark(20).model_dump() | {"step": "../../etc"})],
)
def test_a_damaged_mark_is_an_error_and_nothing_is_deleted(directory, content):
    (directory.path / BEST).write_text(content)
    for use in (directory.best, lambda: directory.prune(1), lambda: locate(directory.path / BEST)):
        with pytest.raises(CheckpointError, match=r"(?s)cannot be read.*delete this file"):
            use()
    assert steps(directory) == [10, 20, 30, 40]


def test_a_mark_that_is_interrupted_is_the_one_before(directory, monkeypatch):
    mark(20).write(directory.path)

    def die(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("anytron.base.files.os.fsync", die)
    with pytest.raises(KeyboardInterrupt):
        mark(40).write(directory.path)
    assert Best.read(directory.path) == mark(20)
