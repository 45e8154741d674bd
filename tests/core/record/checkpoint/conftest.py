"""Checkpoints made of small files."""

import pytest

from anytron.record.checkpoint.directory import CheckpointDirectory
from anytron.record.checkpoint.manifest import DriverState, FileRecord, SourceState


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(tmp_path / "checkpoints")


@pytest.fixture
def save(directory):
    """Save the checkpoint of a step, with two files of an engine."""

    def make(step):
        training = directory.begin(step)
        (training / "ranks").mkdir()
        (training / "common.json").write_text("{}")
        (training / "ranks" / "0.bin").write_bytes(b"\x00\x01" * 600_000)
        names = ("common.json", "ranks/0.bin")
        state = DriverState(
            step=step,
            sampler=(SourceState(epoch=1, position=step, prompts=100),),
            weights_version=step - 1,
            config={"trainer": {"seed": 3}},
        )
        return directory.commit(state, {name: FileRecord.of(training / name) for name in names})

    return make
