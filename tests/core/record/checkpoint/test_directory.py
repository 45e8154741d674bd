"""Which checkpoints there are, which of them is used, and which are deleted."""

import errno
import stat
from pathlib import Path

import pytest

from anytron.base.errors import CheckpointError
from anytron.base.files import remove
from anytron.record.checkpoint.directory import locate
from anytron.record.checkpoint.manifest import DriverState, SourceState


def damage(checkpoint):
    (checkpoint.path / "training/common.json").write_text("[]")


def test_a_checkpoint_gives_back_the_drivers_state(save, directory):
    checkpoint = save(120)
    assert checkpoint.path == directory.path / "step-000120"
    state = checkpoint.state()
    assert (state.step, state.weights_version, state.config) == (120, 119, {"trainer": {"seed": 3}})
    assert state.sampler == (SourceState(epoch=1, position=120, prompts=100),)


def test_the_drivers_state_holds_the_configuration_and_is_private(save):
    assert stat.S_IMODE((save(1).path / "driver.json").stat().st_mode) == 0o600


def test_without_a_manifest_it_is_none(save, directory):
    save(10)
    begun = directory.begin(20)
    (begun / "part").write_text("half")
    notes = []
    assert [checkpoint.step for checkpoint in directory.complete()] == [10]
    assert directory.interrupted() == [begun.parent]
    directory.sweep(notes.append)
    assert not begun.parent.exists()
    assert [checkpoint.step for checkpoint in directory.complete()] == [10]
    assert "step-000020" in notes[0]
    assert "interrupted" in notes[0]


def test_steps_are_ordered_by_number(save, directory):
    for step in (999_999, 1_000_000, 5):
        save(step)
    assert [checkpoint.step for checkpoint in directory.complete()] == [5, 999_999, 1_000_000]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept(save, directory, keep, left):
    for step in (1, 2, 3, 4):
        save(step)
    directory.prune(keep)
    assert [checkpoint.step for checkpoint in directory.complete()] == left
    assert len(list(directory.path.iterdir())) == len(left)


def test_the_newest_good_one_is_used_and_worse_ones_are_put_aside(save, directory):
    save(1)
    good = save(2)
    damage(save(3))
    notes = []
    assert directory.newest_good(notes.append) == good
    assert "common.json has a different checksum" in notes[0] or "common.json has" in notes[0]
    assert (directory.path / "unusable-step-000003").is_dir()
    # The number is free again, and keeping the newest keeps a good one.
    save(3)
    directory.prune(1)
    assert [checkpoint.step for checkpoint in directory.complete()] == [3]
    assert directory.newest_good(notes.append).step == 3


def test_if_all_are_damaged_the_run_does_not_begin_anew_unasked(save, directory):
    damage(save(1))
    damage(save(2))
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint of the run can be used.*step-000002.*step-000001"):
        directory.newest_good(print)
    assert len(directory.complete()) == 2


def test_where_there_is_none_none_is_found(directory):
    assert directory.newest_good(print) is None
    assert directory.complete() == directory.interrupted() == []


def test_a_person_may_name_a_checkpoint_their_directory_or_the_run(save, directory, tmp_path):
    first, second = save(1), save(2)
    assert locate(first.path) == first
    assert locate(directory.path) == second
    assert locate(tmp_path) == second


def test_what_is_no_checkpoint_is_refused_with_the_reason(directory, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        locate(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"has a manifest\.json"):
        locate(directory.begin(7).parent)


@pytest.mark.parametrize("text", ["", "{}", '{"step": 0}', '{"step": "x"}'])
def test_a_damaged_driver_state_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / "driver.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"driver\.json"):
        DriverState.read(tmp_path)


def test_two_saves_of_a_step_have_nothing_in_common_and_a_late_file_keeps_nothing_from_being_deleted(
    directory, monkeypatch
):
    def late(path):
        with pytest.raises(FileNotFoundError):
            (first / "late").touch()
        remove(path)

    first = directory.begin(7)
    (first / "part").touch()
    monkeypatch.setattr("anytron.base.files.remove", late)
    second = directory.begin(7)
    assert second.parent == first.parent
    assert list(second.iterdir()) == []
    assert not first.exists()


def test_a_file_system_that_renames_no_directory_is_named(save, directory, monkeypatch):
    def refused(path, target):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match="its directory cannot be renamed") as caught:
        save(1)
    assert "Operation not supported" in str(caught.value)
    assert "set checkpoint.path to" in str(caught.value)
    assert directory.complete() == []
