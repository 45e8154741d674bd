"""A run in a Ray cluster is the run of this machine: real Megatron, real gloo, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_sort.yaml"
TIMED = ("time/", "throughput/", "memory/")


def train(output, kind, address):
    overrides = (
        f"executor.kind={kind}",
        "parallel.tensor_model_parallel_size=2",
        "trainer.total_steps=2",
        f"trainer.output_dir={output}",
    )
    command = [sys.executable, "-m", "anytron", "train", str(EXAMPLE), *overrides]
    variables = {**os.environ, "RAY_ADDRESS": address}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


@pytest.mark.slow
def test_the_metrics_are_those_of_the_executor_local(ray, tmp_path):
    address = ray.get_runtime_context().gcs_address

    on_cluster = train(tmp_path / "ray", "ray", address)
    here = train(tmp_path / "local", "local", address)

    assert [line["step"] for line in on_cluster] == [1, 2]
    assert on_cluster == here
