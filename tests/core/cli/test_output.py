"""What the command line prints: a run goes on when its output cannot be read any more, and errors are readable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress

from anytron.base.errors import ConfigError
from anytron.cli.main import print_error
from anytron.cli.output import Expendable, run_output
from anytron.cli.train import last_words
from anytron.run.trainer.frame import RunSummary


@pytest.fixture
def broken():
    """A stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        yield stream


@pytest.mark.parametrize(
    ("supervised", "metrics", "said"),
    [
        (False, {"reward/mean": 0.5, "loss/nll": 9.0}, ["early", "2 steps, 1.5 s, last reward 0.500; see run"]),
        (True, {"loss/nll": 1.25}, ["early", "2 steps, 1.5 s, last loss 1.250; see run"]),
        (False, {"kl/coefficient": 0.1}, ["early"]),  # it goes on from another run's checkpoint, and ends before a step
    ],
)
def test_how_a_run_has_ended(supervised, metrics, said):
    summary = RunSummary(Path("run"), 2, metrics, 1.5, early_stop="early")
    assert list(last_words(summary, supervised=supervised)) == said


def test_a_broken_pipe_is_said_once_on_the_error_output_and_ends_nothing(broken, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", broken)
    with run_output() as console:
        for number in range(3):
            console.print(number)
        with Progress(console=console) as bar:
            bar.update(bar.add_task("train"), completed=1)
    assert capsys.readouterr().err == "the output of the run is lost from here on (Broken pipe); the run goes on\n"
    broken.flush()  # as Python does at its end


LOG = "import logging; logging.warning('said to nobody')"
PRINT = "console.print('said to nobody')"


@pytest.mark.parametrize("writes", [LOG, PRINT, f"{LOG}; {PRINT}", f"{PRINT}; {LOG}"])
@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_the_exit_status_is_that_of_the_run_when_both_outputs_are_one_broken_pipe(broken, writes, buffered):
    program = f"from anytron.cli.output import run_output\nwith run_output() as console: {writes}"
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, env=environment, stdout=broken, stderr=broken, check=False).returncode == 0


def test_a_full_disk_below_the_output_ends_nothing_either(capsys):
    with Path("/dev/full").open("w") as full:
        stream = Expendable(full)
        stream.write("x" * 100_000)
        stream.flush()
        stream.write("more")
        stream.flush()
    assert "No space left on device" in capsys.readouterr().err


def test_output_that_was_closed_from_the_start_is_none():
    stream = Expendable(None)
    assert stream.write("text") == 4
    stream.flush()
    assert not stream.isatty()


def test_a_printed_error_indents_the_lines_of_its_cause(capsys):
    print_error(ConfigError("It failed.", why="Traceback:\n  line 1", fix="do that"))
    assert capsys.readouterr().err == "error: It failed.\n  why: Traceback:\n      line 1\n  fix: do that\n"
