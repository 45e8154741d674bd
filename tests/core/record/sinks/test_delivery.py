"""Whatever a sink does, the run neither waits for it nor fails with it, and says what did not arrive."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from anytron.record.sinks.contract import MetricSink
from anytron.record.sinks.delivery import SinkThread


def lines(tmp_path, name="seen.txt"):
    (path,) = (tmp_path / "run" / "tracking").glob(f"*/{name}")
    return path.read_text().splitlines()


RECORDER = """
class Recorder(MetricSink):
    def __init__(self, run, options):
        self.file = (run.directory / "seen.txt").open("a", buffering=1)
        self.file.write(f"open {run.name} {run.after} {run.config['data']['options']}\\n")

    def write(self, step, metrics):
        self.file.write(f"{step} {dict(metrics)}\\n")

    def close(self):
        self.file.write("close\\n")
        self.file.close()
"""


def test_a_sink_gets_every_step_in_order_and_is_closed(with_sinks, tmp_path, told):
    with with_sinks("sinks.py:Recorder", text=RECORDER) as sinks:
        for step in (1, 2, 3):
            sinks.write({"step": step, "reward/mean": step / 2})
    opened, *rest = lines(tmp_path)
    assert opened == "open run None {'api_key': '(hidden)'}"
    assert rest == [*(f"{step} {{'step': {step}.0, 'reward/mean': {step / 2}}}" for step in (1, 2, 3)), "close"]
    assert (told.notes, told.warnings) == ([], [])


def test_a_validation_is_for_sinks_that_want_it(with_sinks, tmp_path, told):
    text = RECORDER + (
        "class Examiner(Recorder):\n"
        "    def write_validation(self, step, metrics): self.file.write(f'examined {step}\\n')\n"
    )
    for name, expected in (
        ("Examiner", ["1 {'step': 1.0}", "examined 1", "close"]),
        ("Recorder", ["1 {'step': 1.0}", "close"]),
    ):
        with with_sinks(f"sinks.py:{name}", text=text) as sinks:
            sinks.write({"step": 1})
            sinks.write({"step": 1, "validation/a/mean@1": 0.5}, validation=True)
        assert (tmp_path / "run" / "tracking" / name / "seen.txt").read_text().splitlines()[1:] == expected
        shutil.rmtree(tmp_path / "run")
    assert told.warnings == []


def test_a_run_that_continues_keeps_the_sinks_directory(with_sinks, tmp_path):
    with with_sinks("sinks.py:Recorder", text=RECORDER) as sinks:
        sinks.write({"step": 1})
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with with_sinks("sinks.py:Recorder", text=RECORDER, after=1) as sinks:
        sinks.write({"step": 2})
    assert [line.split(" {")[0] for line in lines(tmp_path)] == [
        "open run None",
        "1",
        "close",
        "open run 1",
        "2",
        "close",
    ]


def test_hostile_names_and_numbers_reach_a_sink_as_text_and_floats(with_sinks, tmp_path):
    hostile = {"step": 1, "a\nb\u2028\ud800": float("nan"), "huge": 10**400, "-huge": -(10**400), "n" * 999: 0, "": 1}
    with with_sinks("sinks.py:Recorder", text=RECORDER) as sinks:
        sinks.write(hostile)
    found = eval(lines(tmp_path)[1][2:], {"nan": math.nan, "inf": math.inf})
    assert list(found) == ["step", "a_b__", "huge", "-huge", "n" * 250, ""]
    assert math.isnan(found["a_b__"])
    assert (found["huge"], found["-huge"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("error", ["OSError(28, 'No space left on device')", "SystemExit(3)", "KeyError('\\ud800')"])
def test_a_sink_that_raises_is_told_of_once_and_counted(with_sinks, tmp_path, told, error):
    text = f"""
class Broken(MetricSink):
    def __init__(self, run, options): ...
    def write(self, step, metrics):
        if step != 2:
            raise {error}
        (self_made := __import__("pathlib").Path({str(tmp_path)!r}, "two")).touch()
"""
    with with_sinks("sinks.py:Broken", text=text) as sinks:
        for step in (1, 2, 3, 4):
            sinks.write({"step": step})
    first, last = told.warnings
    assert first.startswith(f"the sink Broken failed: {error.partition('(')[0]}")
    assert "metrics.jsonl has every step" in first
    assert last.startswith("the sink Broken lacks 3 steps: 3 failed, 0 were dropped, 0 were still waiting")
    assert (tmp_path / "two").exists(), "a later step may pass"
    log = (tmp_path / "run" / "logs" / "driver.log").read_bytes().decode()
    assert log.count("warning: the sink Broken") == 2


def test_a_sink_that_cannot_be_opened_lacks_all_steps_and_others_lack_none(with_sinks, tmp_path, told):
    text = RECORDER + (
        "class Closed(MetricSink):\n"
        "    def __init__(self, run, options): raise ConnectionError('no route to host')\n"
        "    def write(self, step, metrics): ...\n"
    )
    with with_sinks("sinks.py:Closed", "sinks.py:Recorder", text=text) as sinks:
        for step in (1, 2):
            sinks.write({"step": step})
    assert told.warnings[0].startswith("the sink Closed failed: ConnectionError: no route to host")
    assert told.warnings[1].startswith("the sink Closed lacks 2 steps: 2 failed")
    assert len(lines(tmp_path)) == 4


def test_one_that_cannot_be_closed_is_told_of(with_sinks, told):
    text = (
        "class Stuck(MetricSink):\n"
        "    def __init__(self, run, options): self.place = 'https://here'\n"
        "    def write(self, step, metrics): ...\n"
        "    def close(self): raise TimeoutError('upload')\n"
    )
    with with_sinks("sinks.py:Stuck", text=text) as sinks:
        sinks.write({"step": 1})
    (warning,) = told.warnings
    assert warning.startswith("the sink Stuck failed: TimeoutError: upload (line ")
    assert warning.endswith("sinks.py); the run goes on, and metrics.jsonl has every step")
    assert told.notes == ["Stuck: https://here"]


HANGING = """
import time
class Hanging(MetricSink):
    def __init__(self, run, options): ...
    def write(self, step, metrics): time.sleep(1000)
"""


def test_a_sink_that_hangs_stalls_neither_a_step_nor_the_end(with_sinks, told):
    with with_sinks("sinks.py:Hanging", text=HANGING, timeout=0.5) as sinks:
        began = time.monotonic()
        for step in range(1, 1201):
            sinks.write({"step": step})
        assert time.monotonic() - began < 5
    assert time.monotonic() - began < 10
    slow, not_closed, lacks = told.warnings
    assert "slower than the run: steps are dropped" in slow
    assert "has not closed within 0.5 s (tracking.close_timeout_s)" in not_closed
    # One may be in its hands, 1000 wait, and the rest found no room.
    lacking, dropped, waiting = map(
        int,
        re.match(r"the sink Hanging lacks (\d+) steps: 0 failed, (\d+) were dropped, (\d+) were still", lacks).groups(),
    )
    assert lacking == dropped + waiting
    assert lacking in (1199, 1200)
    assert waiting in (999, 1000)


class Gated(MetricSink):
    """Takes a step when it is let."""

    def __init__(self, gate):
        self.gate, self.seen = gate, []

    def write(self, step, metrics):
        self.gate.acquire()
        self.seen.append(step)


def test_what_finds_no_room_is_dropped_and_what_waits_arrives():
    import threading

    gate = threading.Semaphore(0)
    sink = Gated(gate)
    thread = SinkThread("gated", lambda: sink, queued=2)
    thread.put(1, {})
    deadline = time.monotonic() + 10
    while thread.waiting and time.monotonic() < deadline:  # until it has the first one in its hands
        time.sleep(0.01)
    for step in (2, 3, 4, 5):
        thread.put(step, {})
    assert (thread.waiting, thread.dropped, thread.failed) == (2, 2, 0)
    for _ in range(9):
        gate.release()
    thread.begin_close()
    assert thread.join(10)
    assert sink.seen == [1, 2, 3]


def test_the_process_ends_although_a_sink_hangs(tmp_path):
    """Also where it hangs as it is opened, and where it has threads of its own that are no daemons' business."""
    program = textwrap.dedent("""
        import time
        from anytron.record.sinks.delivery import SinkThread
        thread = SinkThread("hanging", lambda: time.sleep(1000))
        thread.put(1, {})
        thread.begin_close()
        assert not thread.join(0.2)
        print("ended")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
