"""A rank that was stopped in a save, and goes on when the run has started again without it, harms no checkpoint."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anytron.record.checkpoint.directory import CheckpointDirectory
from anytron.record.checkpoint.manifest import DriverState, FileRecord
from tests.backends.megatron.checkpoint.programs.late_rank import MOMENTS

ROOT = Path(__file__).parents[4]
PROGRAM = "tests.backends.megatron.checkpoint.programs.late_rank"


class Rank:
    """The only rank of one start of a run."""

    def __init__(self, model, output):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-W", "ignore", "-m", PROGRAM, str(model), str(output), str(port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, cwd=ROOT, **pipes)

    def begin(self, *request):
        self.process.stdin.write(f"{json.dumps(request)}\n")
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def wait_until_stopped(self):
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert self.process.poll() is None
            time.sleep(0.05)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def starts(tiny_model, tmp_path_factory):
    """The rank of a first start of a run, and of a second one."""
    folder = tmp_path_factory.mktemp("starts")
    ranks = [Rank(tiny_model, folder / name) for name in ("first", "second")]
    yield ranks
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


@pytest.mark.some(1)
@pytest.mark.parametrize("at_once", [True, False], ids=["before the new files", "when the checkpoint is complete"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_of_an_earlier_start_writes_nothing(starts, tmp_path, moment, at_once):
    old, new = starts
    old.begin("save", str(begun := CheckpointDirectory(tmp_path).begin(7)), moment)
    old.wait_until_stopped()

    directory = CheckpointDirectory(tmp_path)
    directory.sweep(lambda said: None)
    training = directory.begin(7)
    if at_once:
        old.go_on()
        late = old.answer()
    new.begin("save", str(training), None)
    files = {name: FileRecord(**record) for name, record in new.answer()["files"].items()}
    checkpoint = directory.commit(DriverState(step=7, sampler=(), weights_version=7, config={}), files)
    if not at_once:
        old.go_on()
        late = old.answer()

    assert late["what"] == "The directory of the checkpoint is gone: this rank writes nothing."
    assert late["where"] == str(begun)
    assert "the run has started again without this rank" in late["why"]
    # Before any collective, which would fail for lack of peers, and say less.
    assert late["in"] == ("save_checkpoint" if moment == MOMENTS[0] else "written_files")
    checkpoint.verify()
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.path.name]
    new.begin("load", str(checkpoint.training))
    assert new.answer().keys() == {"weights"}
