"""Sinks and traces of a run that really trains."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.core.run.trainer.disturbed_runs import lines
from tests.core.run.trainer.validations import section

SINKS = """
import time
from anytron.record.sinks import MetricSink

class Kept(MetricSink):
    def __init__(self, run, options):
        self.file = (run.directory / "steps.txt").open("a", buffering=1)
    def write(self, step, metrics):
        self.file.write(f"{step} {metrics['reward/mean']}\\n")

    def close(self):
        self.file.close()

class Broken(Kept):
    def __init__(self, run, options): ...
    def close(self): ...
    def write(self, step, metrics): raise OSError(28, "No space left on device")

class Hanging(Broken):
    def write(self, step, metrics): time.sleep(1000)

def length(samples):
    return [float(sample.own_tokens) for sample in samples]
"""


def test_a_run_goes_on_whatever_its_sinks_do(new_run):
    run = new_run(
        SINKS,
        rewards=[{"function": "task.py:length"}],
        tracking={
            "sinks": [{"sink": f"task.py:{name}"} for name in ("Kept", "Broken", "Hanging")],
            "close_timeout_s": 1.0,
        },
        trainer={"total_steps": 3, "save_hf": False},
    )
    output = run.train().output_dir
    metrics = lines(output / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3]
    kept = (output / "tracking" / "Kept" / "steps.txt").read_text().splitlines()
    assert kept == [f"{record['step']} {record['reward/mean']}" for record in metrics]
    log = (output / "logs" / "driver.log").read_text()
    assert log.count("the sink Broken failed: OSError: [Errno 28]") == 1
    assert "the sink Broken lacks 3 steps" in log
    assert "the sink Hanging has not closed within 1 s" in log
    assert "Kept" not in log


def test_validations_reach_sinks_after_the_step_that_they_examine(new_run):
    text = SINKS + (
        "class Examiner(Kept):\n"
        "    def write_validation(self, step, metrics):\n"
        "        self.file.write(f\"examined {step} {metrics['validation/digits/mean@4']}\\n\")\n"
    )
    run = new_run(
        text,
        tracking={"sinks": [{"sink": "task.py:Examiner"}]},
        trainer={"total_steps": 2, "save_hf": False},
        validation=section(every_steps=1),
    )
    output = run.train().output_dir
    trained = [f"{one['step']} {one['reward/mean']}" for one in lines(output / "metrics.jsonl")]
    examined = [
        f"examined {one['step']} {one['validation/digits/mean@4']}" for one in lines(output / "validation.jsonl")
    ]
    seen = (output / "tracking" / "Examiner" / "steps.txt").read_text().splitlines()
    assert seen == [examined[0], trained[0], examined[1], trained[1], examined[2]]


def test_chosen_steps_are_recorded_and_no_others(new_run):
    run = new_run(trainer={"total_steps": 3, "save_hf": False, "profile": {"steps": [2], "stacks": False}})
    output = run.train().output_dir
    (trace,) = (output / "profile").iterdir()
    assert trace.name == "step-00002-rank-0.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_a_trace_that_is_too_large_is_deleted_and_the_run_goes_on(new_run):
    run = new_run(trainer={"total_steps": 2, "save_hf": False, "profile": {"steps": [1], "max_mib": 1e-4}})
    output = run.train().output_dir
    assert len(lines(output / "metrics.jsonl")) == 2
    assert list((output / "profile").iterdir()) == []
    assert any("its trace could not be written: the trace has" in text for text in run.progress.warnings)


def test_memory_of_every_step(new_run):
    run = new_run(trainer={"total_steps": 2, "save_hf": False})
    for record in lines(run.train().output_dir / "metrics.jsonl"):
        assert record["memory/training_peak_bytes"] > 2**20
        assert record["throughput/tokens_per_s_per_device"] == pytest.approx(record["throughput/tokens_per_s"])
