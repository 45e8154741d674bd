"""``anytron report`` and ``anytron watch``, as a person calls them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time

import pytest

from anytron.base.files import Lock
from anytron.cli.report import MOST_RUNS
from anytron.record.report.page import MARK
from tests.core.record.report.runs import HOSTILE, make_run, metrics, record, sample

COMMAND = [sys.executable, "-c", "from anytron.cli.main import run; run()"]
PLAIN = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}


def anytron(*arguments, cwd=None, **env):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | PLAIN | env,
        cwd=cwd,
        timeout=120,
        check=False,
    )


# ---- report ---------------------------------------------------------------------------------------------


def test_a_report_is_one_private_file_and_is_written_again(tmp_path):
    make_run(tmp_path / "run")
    for _ in range(2):
        done = anytron("report", "run", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"report\.html \(0\.\d\d MB\) shows 1 run\n", done.stdout)
    file = tmp_path / "report.html"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "configurations and prompts may hold secrets"
    assert file.read_text().startswith(MARK)


def test_a_run_that_is_named_twice_is_shown_once_and_what_cannot_be_read_is_said(tmp_path):
    path = make_run(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31')
    done = anytron("report", path, f"{path}/", "-o", tmp_path / "x.html")
    assert done.stdout.endswith("shows 1 run\n")
    assert done.stderr == f"warning: {path}: metrics.jsonl ends in the middle of a line, which is left out\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "This is not the directory of a run."),
        (["run", "-o", "mine.html"], "is not a report"),
        (["run", "-o", "run"], "cannot be written"),
        (["run", "-o", "nowhere/x.html"], "cannot be written"),
        ([f"run{number}" for number in range(MOST_RUNS + 1)], "too many runs"),
    ],
)
def test_what_cannot_be_done_is_an_error_and_destroys_nothing(tmp_path, arguments, said):
    make_run(tmp_path / "run")
    (tmp_path / "mine.html").write_text("my own page")
    done = anytron("report", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "mine.html").read_text() == "my own page"
    assert not (tmp_path / "report.html").exists()


# ---- watch ----------------------------------------------------------------------------------------------


def test_one_picture_of_a_run(tmp_path):
    path = make_run(tmp_path / "run", 12, run=record(failure="Rank 1 died."))
    (path / "losses.jsonl").write_text(json.dumps({"after_step": 9, "lost": "It died.", "then": "it ends"}) + "\n")
    (path / "logs" / "driver.log").write_text("2026-01-01 warning: grad_norm is 0\n")
    done = anytron("watch", path, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "failed",
        "step 12/30  40%  54 s trained",
        "on 2 x Chip 9",
        "reward/mean 0.6988",
        "grad_norm",
        "policy/kl",
        "rollout 67%  update 22%  other 11%",
        "lost after step 9: It died. it ends",
        "warning: grad_norm is 0",
        "error: Rank 1 died.",
        "step 12, reward 0.75: What is 3 + 12?",
        "It is 15.",
    ):
        assert text in done.stdout, done.stdout
    assert "loss/kl" not in done.stdout
    assert "\u2588" in done.stdout
    assert "\x1b" not in done.stdout


def test_one_picture_in_ascii_of_what_is_hostile(tmp_path):
    path = make_run(
        tmp_path / "run",
        2,
        metrics_of=lambda step: {"step": step, "reward/mean": float("nan"), "lr": 1e-6},
        samples_of=lambda step: [
            sample(step, number, prompt=text, response=text, reward_errors={"judge": text})
            for number, text in enumerate(HOSTILE[-3:] if step == 1 else HOSTILE[4:7])
        ],
    )
    (path / "logs" / "driver.log").write_text("\n".join(HOSTILE[4:7]), errors="replace")
    for encoding in ("ascii", "utf-8"):
        done = anytron("watch", path, "--once", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(one == "\n" or one.isprintable() for one in done.stdout)
        assert "\\x1b[2J" in done.stdout


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(tmp_path, steps):
    path = make_run(tmp_path / "run", steps, run=record())
    done = anytron("watch", path, "--once", COLUMNS="40")
    assert done.returncode == 0
    assert ("no step is recorded yet" in done.stdout) is (steps == 0)
    assert max(map(len, done.stdout.splitlines())) <= 40


def test_what_is_no_run_is_refused(tmp_path):
    done = anytron("watch", tmp_path)
    assert done.returncode == 1
    assert "This is not the directory of a run." in done.stderr


class Going:
    """A run that this process writes."""

    def __init__(self, path):
        self.path = make_run(path, 3, run=record())
        self.lock = Lock(self.path / ".lock")

    def step(self, number):
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(number)) + "\n")

    def end(self, **how):
        record(**how).write(self.path)
        # As if the process that had the lock were gone.
        (self.path / ".lock").write_text("process 999999999 on somewhere\n")
        self.lock.release()


def test_elsewhere_than_on_a_terminal_it_is_a_line_per_step_until_the_run_ends(tmp_path):
    run = Going(tmp_path / "run")
    command = [*COMMAND, "watch", str(run.path), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | PLAIN) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[2] == "step 3/30  reward 0.259  12,345 tokens/s  4.50 s/step\n"
        run.step(4)
        assert process.stdout.readline().startswith("step 4/30 ")
        with (run.path / "logs" / "driver.log").open("a") as file:
            file.write("2026-01-01 warning: \x1b[2J\n")
        assert process.stdout.readline() == "2026-01-01 warning: \\x1b[2J\n"
        run.step(3)
        assert process.stdout.readline() == "the run goes on after step 3\n"
        assert process.poll() is None
        run.end(failure="Rank 1 died.")
        assert process.stdout.read() == f"{run.path}: failed\nerror: Rank 1 died.\n"
        assert process.wait(20) == 0


def read_until(descriptor, text):
    """What comes from a terminal until a text is in it, or the terminal is closed."""
    found, deadline = "", time.monotonic() + 60
    while text not in found:
        assert select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0], found
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:  # Linux's end of a terminal
            break
        if not data:
            break
        found += data.decode(errors="replace")
    return found


@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_on_a_terminal_it_is_drawn_in_place_unless_the_terminal_is_dumb(tmp_path, kind):
    run = Going(tmp_path / "run")
    ours, theirs = pty.openpty()
    command = [*COMMAND, "watch", str(run.path), "--interval", "0.1"]
    size = {"COLUMNS": "100", "LINES": "40"}
    environment = os.environ | PLAIN | size | {"TERM": kind}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        first = read_until(ours, "It is 6." if kind != "dumb" else "step 3/30")
        run.step(4)
        read_until(ours, "step 4/30")
        run.end(finished_step=30)
        last = read_until(ours, "finished" if kind != "dumb" else ": finished")
        rest = read_until(ours, "nothing more")
        assert process.wait(20) == 0
    os.close(ours)
    assert "finished" in last
    hides, shows = "\x1b[?25l", "\x1b[?25h"
    if kind == "dumb":
        assert "\x1b[" not in first + last + rest
    else:
        assert hides in first
        assert shows in last + rest, "the cursor is given back"


def test_ctrl_c_ends_watching_and_not_the_run(tmp_path):
    run = Going(tmp_path / "run")
    with subprocess.Popen(
        [*COMMAND, "watch", str(run.path)], stdout=subprocess.PIPE, env=os.environ | PLAIN
    ) as process:
        process.stdout.readline()
        process.send_signal(2)
        assert process.wait(20) == 130
    run.step(4)
    run.lock.release()
