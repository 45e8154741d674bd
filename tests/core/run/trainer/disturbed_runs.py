"""End a run early, and compare what it has left with what an undisturbed one leaves."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from anytron.record.checkpoint.directory import CheckpointDirectory

EVERY_STEP = {"every_steps": 1}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def comparable(path: Path) -> list[dict]:
    """Metrics without what the clock says."""
    return [
        {key: value for key, value in record.items() if not key.startswith(("time/", "throughput/", "memory/"))}
        for record in lines(path / "metrics.jsonl")
    ]


def steps(path: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointDirectory(path / "checkpoints").complete()]


def raise_at(run, call, error=KeyboardInterrupt, method="update"):
    """Let the n-th call of a method of an engine fail, as if the process had ended there."""
    calls = []

    class Group:
        size = 1
        ended = False

        def __init__(self, group):
            self.group = group

        def fail(self, name):
            calls.append(name)
            if calls.count(method) == call and name == method:
                raise error

        def submit(self, name, *args, **kwargs):
            self.fail(name)
            return self.group.submit(name, *args, **kwargs)

        def call(self, name, *args, **kwargs):
            return self.submit(name, *args, **kwargs).result()

        def submit_each(self, name, shares):
            self.fail(name)
            return self.group.submit_each(name, shares)

        def scatter(self, name, shares):
            return self.submit_each(name, shares).result()

    start = run.executor.start
    run.executor.start = lambda spec: Group(start(spec))
    return calls


def output(new_run) -> Path:
    return Path(new_run().config.trainer.output_dir)


def assert_equal(path, undisturbed):
    metrics, samples, model = undisturbed
    assert comparable(path) == metrics
    assert lines(path / "samples.jsonl") == samples
    weights = load_file(path / "hf" / "model.safetensors")
    assert all((weights[name] == tensor).all() for name, tensor in model.items())
