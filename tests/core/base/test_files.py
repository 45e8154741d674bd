"""Files that are whole or not there, locks, and errors of a machine that has run out of something."""

import contextlib
import errno
import os
import shutil
import stat

import pytest

from anytron.base.errors import ResourceError
from anytron.base.files import (
    Lock,
    LockedError,
    discard,
    exhausted,
    lock_owner,
    publish_directory,
    replacing,
    write_durably,
)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    write_durably(file, "old")

    def write_half():
        with replacing(file) as new:
            new.write("half of")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert file.read_text() == "old"
    (tmp_path / ".a.json.part").write_text("of a process that was killed")
    write_durably(file, "new \ud800", 0o600)
    assert file.read_text() == "new \\ud800"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "a").symlink_to(tmp_path / "target")
    write_durably(tmp_path / "a", "ours")
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "a").is_symlink()


def test_a_directory_appears_when_it_is_complete(tmp_path):
    def fail(directory):
        (directory / "config.json").touch()
        raise KeyboardInterrupt

    def write(directory):
        assert list(directory.iterdir()) == []
        (directory / "model.safetensors").touch(0o600)
        (directory / "inside").mkdir()
        assert not (tmp_path / "hf").exists() or (tmp_path / "hf" / "old").exists()

    with pytest.raises(KeyboardInterrupt):
        publish_directory(tmp_path / "hf", fail)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "old").touch()
    mask = os.umask(0o027)
    try:
        publish_directory(tmp_path / "hf", write)
    finally:
        os.umask(mask)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"model.safetensors", "inside"}
    # safetensors makes files that only their owner can read; the group reads what the umask lets it.
    assert stat.S_IMODE((tmp_path / "hf" / "model.safetensors").stat().st_mode) == 0o640


def test_who_began_an_earlier_version_of_a_directory_does_not_write_into_a_new_one(tmp_path):
    begun = []

    def stop(directory):
        begun.append(directory)
        raise KeyboardInterrupt

    def write(directory):
        (directory / "new").touch()
        with pytest.raises(FileNotFoundError):
            (begun[0] / "late").touch()
        begun[0].mkdir(parents=True)  # some writers make it again

    with pytest.raises(KeyboardInterrupt):
        publish_directory(tmp_path / "hf", stop)
    publish_directory(tmp_path / "hf", write)
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == ["hf", "hf/new"]


def test_a_file_that_comes_late_keeps_no_directory_from_being_deleted(tmp_path, monkeypatch):
    def late(path):
        with contextlib.suppress(FileNotFoundError):  # its process knows the name that the directory had
            (tmp_path / "step" / "begun" / "late").touch()
        assert [one.name for one in path.rglob("*") if one.is_file()] == ["whole"]
        rmtree(path)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", late)
    (tmp_path / "step" / "begun").mkdir(parents=True)
    (tmp_path / "step" / "begun" / "whole").touch()
    discard(tmp_path / "step")
    assert list(tmp_path.iterdir()) == []


def test_what_a_link_leads_to_is_not_discarded(tmp_path):
    (tmp_path / "theirs" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    discard(tmp_path / "link")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["theirs", "theirs/inside"]


def test_a_lock_says_who_has_it_and_can_be_taken_when_it_is_released(tmp_path):
    lock = Lock(tmp_path / "lock")
    with pytest.raises(LockedError, match=rf"process {os.getpid()} on "):
        Lock(tmp_path / "lock")
    lock.release()
    Lock(tmp_path / "lock").release()


def test_one_can_ask_who_has_a_lock_without_taking_it(tmp_path):
    assert lock_owner(tmp_path / "lock") is None
    assert not (tmp_path / "lock").exists()
    lock = Lock(tmp_path / "lock")
    assert lock_owner(tmp_path / "lock").startswith(f"process {os.getpid()} on ")
    with pytest.raises(LockedError):
        Lock(tmp_path / "lock")
    lock.release()
    assert lock_owner(tmp_path / "lock") is None
    Lock(tmp_path / "lock").release()


def test_a_file_system_without_locks_is_no_error_and_known(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert not Lock(tmp_path / "lock").effective


FEW = "This process has no file descriptors left."


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/a"), "The disk is full."),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "The disk quota is used up."),
        (OSError(errno.EMFILE, "Too many open files"), FEW),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "The disk is full.",
        ),
        (RuntimeError("unable to open file <a> in read-only mode: Too many open files (24)"), FEW),
        (RuntimeError("[enforce fail at loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files"), FEW),
        (OSError("a: Too many open files in system"), "The machine has no file descriptors left."),
        (OSError(errno.ENFILE, "Too many open files in system"), "The machine has no file descriptors left."),
        (OSError(errno.EIO, "Input/output error", "/data/a"), "A disk has failed."),
        (OSError(errno.ESTALE, "Stale file handle"), "A file system has lost a file."),
    ],
)
def test_what_has_run_out_is_explained(error, what):
    found = exhausted(error)
    assert isinstance(found, ResourceError)
    assert found.what == what
    assert found.fix
    assert found.where == (getattr(error, "filename", None) or "")


def test_other_errors_are_not_explained():
    assert exhausted(PermissionError(errno.EACCES, "no")) is None
    assert exhausted(ValueError("no space")) is None
