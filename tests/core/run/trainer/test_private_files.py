"""What others can read of a run has no secret of its configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.core.run.trainer.disturbed_runs import EVERY_STEP
from tests.core.run.trainer.validations import section

SECRET = "hunter2secret"
CODE = """
from anytron.record.sinks import MetricSink

class Kept(MetricSink):
    def __init__(self, run, options):
        self.file = (run.directory / "steps.txt").open("a", buffering=1)
        self.file.write(repr(run.config))
    def write(self, step, metrics):
        self.file.write(repr(dict(metrics)))
    def close(self):
        self.file.close()

def keyed(samples, api_key):
    if samples[0].prompt_id.endswith("1"):
        raise ValueError("the service does not answer")
    return [0.5 * len(sample.response_text) for sample in samples]
"""


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def files(path: Path) -> dict[bool, dict[str, bytes]]:
    """Every file of a run, by whether others can read it."""
    found: dict[bool, dict[str, bytes]] = {True: {}, False: {}}
    for file in path.rglob("*"):
        if file.is_file():
            found[bool(file.stat().st_mode & 0o044)][str(file.relative_to(path))] = file.read_bytes()
    return found


@pytest.mark.parametrize("name", ["keyed", SECRET], ids=["a-secret-in-options", "twin-in-a-name"])
def test_no_file_that_others_can_read_has_a_secret(new_run, umask, name):
    run = new_run(
        CODE,
        rewards=[{"function": "task.py:keyed", "name": name, "options": {"api_key": SECRET}}],
        validation=section(before_training=True),
        tracking={"sinks": [{"sink": "task.py:Kept", "options": {"token": SECRET}}]},
        checkpoint=EVERY_STEP,
    )
    found = files(run.train().output_dir)
    private = {file for file, content in found[False].items() if SECRET.encode() in content}
    assert {"config.yaml", "run.json"} <= private
    assert {Path(file).name for file in private} == {"config.yaml", "run.json", "driver.json"}
    assert {"metrics.jsonl", "samples.jsonl", "validation.jsonl", "patches.json", "hf/config.json"} <= set(found[True])
    told = {file for file, content in found[True].items() if SECRET.encode() in content}
    if name == SECRET:  # a reference to the environment here is refused: tests/core/config/test_load.py
        assert "metrics.jsonl" in told
    else:
        assert told == set()
