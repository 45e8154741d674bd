"""The example of two stages, run as a user runs it; and killed between them, and in each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.demo.expected import SLACK, assert_rewarded, expected
from tests.demo.test_grpo_sort import ROOT, anytron, users_environment

EXAMPLE = ROOT / "examples" / "sft_then_grpo_sort.yaml"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_from_answers_and_then_from_rewards(tmp_path):
    finished = anytron("train", str(EXAMPLE), f"trainer.output_dir={tmp_path}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    shown, rewarded = (lines(tmp_path / name / "metrics.jsonl") for name in ("1-sft", "2-grpo"))
    assert shown[0]["loss/nll"] > 2.5
    assert shown[-1]["loss/nll"] < 1.5
    validated = lines(tmp_path / "1-sft" / "validation.jsonl")
    held_out = {line["step"]: line["validation/held_out/loss"] for line in validated}
    assert [*held_out.values()] == sorted(held_out.values(), reverse=True)
    (loss,) = (figure for figure in expected("sft_then_grpo_sort") if figure.what == "held-out loss")
    assert held_out[loss.step] <= loss.value + SLACK
    assert rewarded[0]["reward/mean"] > 0.2, "it begins with what it was shown"
    assert_rewarded("sft_then_grpo_sort", rewarded)
    report = anytron("report", str(tmp_path), "-o", str(tmp_path / "report.html"))
    assert "shows 2 runs" in report.stdout, report.stdout + report.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["parallel.tensor_model_parallel_size", "parallel.data_parallel_size"])
def test_both_stages_work_on_two_ranks(layout, tmp_path):
    steps = ["stages[0].trainer.total_steps=3", "stages[1].trainer.total_steps=2"]
    for size in (1, 2):
        finished = anytron(
            "train", str(EXAMPLE), f"trainer.output_dir={tmp_path / str(size)}", f"{layout}={size}", *steps
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
    for one, two in zip(*(lines(tmp_path / size / "1-sft" / "metrics.jsonl") for size in "12"), strict=True):
        for name in ("loss/nll", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("settings", "trained"),
    [((), "hf/model.safetensors"), (("model.lora={rank: 4}",), "adapter/adapter_model.safetensors")],
    ids=["weights", "adapters"],
)
def test_the_second_stage_begins_with_what_the_first_has_trained(settings, trained, tmp_path):
    """Its updates are too small for float32: what it leaves is what it has found, bit for bit."""
    still = ["stages[1].optimizer={lr: 1.0e-30}", "stages[0].trainer.total_steps=4", "stages[1].trainer.total_steps=2"]
    finished = anytron("train", str(EXAMPLE), f"trainer.output_dir={tmp_path}", *still, *settings)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    first, second = (load_file(tmp_path / name / trained) for name in ("1-sft", "2-grpo"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    if settings:
        assert any(tensor.any() for name, tensor in first.items() if "lora_B" in name), "the first has trained them"
    for line in lines(tmp_path / "2-grpo" / "metrics.jsonl"):
        assert line["rollout/log_prob_abs_diff"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_in_each_stage_ends_as_one_that_was_not(tmp_path):
    """SIGKILL to the driver; what it started ends by itself."""
    settings = [
        "checkpoint.every_steps=2",
        "checkpoint.async=false",
        "stages[0].trainer.total_steps=6",
        "stages[1].trainer.total_steps=5",
    ]
    whole = anytron("train", str(EXAMPLE), f"trainer.output_dir={tmp_path / 'whole'}", *settings)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for name, step in (("1-sft", 3), ("2-grpo", 3)):
        command = [sys.executable, "-m", "anytron", "train", str(EXAMPLE), f"trainer.output_dir={tmp_path / 'run'}"]
        run = subprocess.Popen([*command, *settings, "resume=auto"], start_new_session=True, env=users_environment())
        metrics = tmp_path / "run" / name / "metrics.jsonl"
        while run.poll() is None and (not metrics.is_file() or len(metrics.read_text().splitlines()) < step):
            time.sleep(0.02)
        assert run.poll() is None, "it ended before it could be killed"
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    finished = anytron("train", str(EXAMPLE), f"trainer.output_dir={tmp_path / 'run'}", *settings, "resume=auto")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for name in ("1-sft", "2-grpo"):
        one, other = (
            [
                {key: value for key, value in line.items() if not key.startswith(("time/", "throughput/", "memory/"))}
                for line in lines(tmp_path / run / name / "metrics.jsonl")
            ]
            for run in ("whole", "run")
        )
        assert one == other
        hashes = [(tmp_path / run / name / "hf" / "model.safetensors").read_bytes() for run in ("whole", "run")]
        assert hashes[0] == hashes[1]
