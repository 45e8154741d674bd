"""A run's directories in TMPDIR, and what becomes of them when the run is killed."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from anytron.base.files import WEIGHTS, PrivateDirectory

RUN = """
import time
from anytron.base.files import WEIGHTS, PrivateDirectory
with PrivateDirectory(WEIGHTS) as made:
    (made.path / "policy.safetensors").write_bytes(bytes(100))
    print(made.path, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_private_and_goes_with_its_run(temporary):
    with PrivateDirectory(WEIGHTS) as made:
        directory = made.path
        assert directory.parent == temporary
        assert directory.stat().st_mode & 0o077 == 0
        (directory / "policy.safetensors").touch()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_is_deleted_by_the_next_and_a_living_one_keeps_its_own(temporary):
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as living:
        with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as killed:
            theirs, left = (Path(run.stdout.readline().strip()) for run in (living, killed))
            killed.send_signal(signal.SIGKILL)
            killed.wait()
        assert (left / "policy.safetensors").is_file()
        with PrivateDirectory(WEIGHTS):
            assert not left.exists()
            assert (theirs / "policy.safetensors").is_file()
        living.kill()


def test_nothing_else_is_taken_for_one(temporary):
    """Other directories of the name, without a lock; and links to where somebody wants files deleted."""
    (temporary / "anytron-weights-mine").mkdir()
    precious = temporary / "precious"
    precious.mkdir()
    (precious / "lock").touch()
    (temporary / "anytron-weights-link").symlink_to(precious)
    with PrivateDirectory(WEIGHTS):
        pass
    assert (temporary / "anytron-weights-mine").is_dir()
    assert (precious / "lock").exists()
