"""A run that is killed and continued as docs/how-to/resume-a-run.md says: real Megatron, real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
COMMAND = [sys.executable, "-m", "anytron"]
SETTINGS = ("trainer.total_steps=5", "algorithm.kl_coefficient=0.01", "algorithm.mini_batches=2", "tracking.plot=false")


def anytron(*arguments):
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OF_A_MACHINE = ("time/", "throughput/", "memory/")


def metrics(output):
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if not key.startswith(("time/", "throughput/", "memory/"))
        }
        for line in (output / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
def test_a_killed_run_is_continued_to_the_digit_and_its_model_comes_out_of_the_checkpoint(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    anytron("train", EXAMPLE, *SETTINGS, f"trainer.output_dir={whole}")
    given = [*map(str, ("train", EXAMPLE, *SETTINGS, f"trainer.output_dir={killed}")), "checkpoint.every_steps=1"]
    run = subprocess.Popen([*COMMAND, *given], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (killed / "checkpoints/step-000002/manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert len(metrics(killed)) < 5

    said = anytron(*given, "resume=auto")

    assert "started on 1 x cpu after step " in said
    assert metrics(killed) == metrics(whole)
    weights = (whole / "hf/model.safetensors").read_bytes()
    assert (killed / "hf/model.safetensors").read_bytes() == weights
    assert "the run has finished: step 5 is the last" in anytron(*given, "resume=auto")

    assert [row["step"] for row in json.loads(anytron("checkpoint", "list", killed, "--json"))] == [4, 5]
    assert anytron("checkpoint", "verify", killed).count("good") == 2
    anytron(
        "checkpoint", "export", killed, tmp_path / "model", f"model.tokenizer={EXAMPLE.parent}/sort_digits.py:tokenizer"
    )
    assert (tmp_path / "model/model.safetensors").read_bytes() == weights
    assert (tmp_path / "model/tokenizer.json").exists()
