"""A manifest notices everything that can happen to files."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from anytron.base.errors import CheckpointError, ResourceError
from anytron.record.checkpoint.manifest import FileRecord, Manifest


def test_a_record_is_size_and_sha256(tmp_path):
    content = bytes(range(256)) * 10_000
    (tmp_path / "file").write_bytes(content)
    assert FileRecord.of(tmp_path / "file") == FileRecord(len(content), hashlib.sha256(content).hexdigest())


def test_what_is_as_it_was_written_has_no_problems(save):
    checkpoint = save(4)
    assert set(checkpoint.manifest().files) == {"driver.json", "training/common.json", "training/ranks/0.bin"}
    assert checkpoint.manifest().problems(checkpoint.path) == []
    checkpoint.verify()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: flip(path / "training/ranks/0.bin"), "training/ranks/0.bin has a different checksum"),
        (
            lambda path: (path / "training/ranks/0.bin").write_bytes(b"\x00"),
            "0.bin has 1 bytes and should have 1200000",
        ),
        (lambda path: (path / "training/common.json").unlink(), "training/common.json is missing"),
        (lambda path: (path / "training/evil.pkl").write_bytes(b""), "training/evil.pkl is not in the manifest"),
        (lambda path: flip(path / "driver.json"), "driver.json has a different checksum"),
    ],
    ids=["flipped", "truncated", "deleted", "added", "driver"],
)
def test_what_has_changed_is_named(save, harm, says):
    checkpoint = save(4)
    harm(checkpoint.path)
    with pytest.raises(CheckpointError, match=says):
        checkpoint.verify()


def test_a_link_is_not_a_file_of_the_checkpoint(save, tmp_path):
    checkpoint = save(4)
    elsewhere = tmp_path / "elsewhere"
    (checkpoint.path / "training/common.json").rename(elsewhere)
    (checkpoint.path / "training/common.json").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"common\.json is missing"):
        checkpoint.verify()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"files": {}}', "damaged"),
        ('{"format": 1, "files": {"a": {"size": 1}}}', "damaged"),
        ('{"format": 99, "files": {}}', "format is 99; this version reads format 1"),
        (json.dumps({"format": 1, "files": {"../a": {"size": 1, "sha256": ""}}}), "outside of the checkpoint"),
        (json.dumps({"format": 1, "files": {"/a": {"size": 1, "sha256": ""}}}), "outside of the checkpoint"),
    ],
)
def test_a_manifest_that_cannot_be_used_says_why(tmp_path, text, says):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        Manifest.read(tmp_path)


def test_an_entry_without_a_name_is_reported(tmp_path):
    files = {"": {"size": 1, "sha256": ""}}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    assert Manifest.read(tmp_path).problems(tmp_path) == ["a file without a name is missing"]


def test_nothing_is_declared_complete_whose_files_are_not_there(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    with pytest.raises(CheckpointError, match="a has 2 bytes and should have 3; b is missing"):
        Manifest({"a": FileRecord(3, ""), "b": FileRecord(1, "")}).write(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_good_checkpoint_that_cannot_be_read_now_is_not_set_aside(save, directory, monkeypatch, number):
    checkpoint = save(3)
    before = sorted(path.name for path in checkpoint.path.iterdir())
    _open = Path.open

    def failing(self, *arguments, **options):
        if self.suffix == ".bin":
            raise OSError(number, os.strerror(number), str(self))
        return _open(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(ResourceError) as raised:
        directory.newest_good(print)
    assert "0.bin" in raised.value.where
    assert raised.value.fix
    monkeypatch.undo()
    assert sorted(path.name for path in checkpoint.path.iterdir()) == before
    assert directory.newest_good(print) == checkpoint
