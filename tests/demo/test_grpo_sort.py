"""The README's demonstration, run as a user runs it: the command line, real Megatron, real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import listening
from tests.demo.expected import assert_rewarded

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
METRICS = {
    "step",
    "reward/mean",
    "reward/std",
    "loss/policy",
    "loss/kl",
    "policy/entropy",
    "grad_norm",
    "response/length_mean",
    "rollout/log_prob_abs_diff",
    "time/step_s",
    "time/sync_s",
    "time/rollout_s",
    "time/update_s",
    "throughput/tokens_per_s",
}


def users_environment():
    """The environment without the tests' own count of threads, which would decide, and with it the last digits."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def anytron(*arguments, **environment):
    command = [sys.executable, "-m", "anytron", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**users_environment(), **environment}, check=False
    )


STEEPEST = ("trainer.total_steps=150", "optimizer.schedule=constant")
"""For layouts, which agree step by step: no more than the part in which a reward of 0.04 becomes one of 0.5."""


def train(output, *overrides, **environment):
    stdout, metrics, seen = watched(output, *overrides, **environment)
    listening.check("one machine", seen)
    return stdout, metrics


def watched(output, *overrides, example=EXAMPLE, **environment):
    """Train an example; return what it printed, its metrics, and where its processes have listened."""
    command = [sys.executable, "-m", "anytron", "train", str(example), f"trainer.output_dir={output}", *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        subprocess.Popen(command, text=True, env={**users_environment(), **environment}, **pipes) as run,
        listening.watched(run.pid, output) as seen,
    ):
        stdout, stderr = run.communicate()
    assert run.returncode == 0, stdout + stderr
    return stdout, records(output / "metrics.jsonl"), seen


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def kill_writer_of(log):
    """Kill the process that writes a log."""
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if output.readlink() == log:
                os.kill(int(output.parts[2]), signal.SIGKILL)
                return
    raise AssertionError(f"nobody writes {log}")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Three steps with everything switched on: a reference model, two updates per step."""
    output = tmp_path_factory.mktemp("short") / "run"
    overrides = ("trainer.total_steps=3", "algorithm.kl_coefficient=0.01", "algorithm.mini_batches=2")
    stdout, metrics = train(output, *overrides)
    return output, stdout, metrics


def test_the_first_line_says_which_platform_was_chosen_and_why(short_run):
    _, stdout, _ = short_run
    assert stdout.splitlines()[0].startswith("platform: cpu (")


def test_every_promised_metric_is_there(short_run):
    _, _, metrics = short_run
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert set(line) >= METRICS
        assert line["rollout/log_prob_abs_diff"] < 1e-5
        assert line["grad_norm"] > 0
    # The first update of a step is made before the policy has left its reference.
    assert metrics[2]["loss/kl"] > metrics[0]["loss/kl"] >= 0


def test_the_run_leaves_what_the_readme_says(short_run):
    output, _, _ = short_run
    assert (output / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    patches = json.loads((output / "patches.json").read_text())
    applied = {record["id"] for rank in patches["trainer"] for record in rank["patches"]}
    assert {"megatron.torch-cuda", "megatron.portable-transformer-engine", "megatron.mcore-bridge-import"} <= applied
    assert not [record for rank in patches["rollout"] for record in rank.get("patches", [])]
    assert (output / "logs" / "trainer-0.log").exists()
    kernels = patches["trainer"][0]["kernels"]
    fused = {f"fused_kernel {name}" for name in ("adam", "rms_norm", "rope", "swiglu")}
    assert kernels.keys() >= {"attention_kernel", *fused, "log_prob_kernel"}
    assert set(kernels.values()) == {"neutral-default"}


def test_the_trained_model_loads_with_transformers_and_has_moved(short_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, _, _ = short_run
    trained = AutoModelForCausalLM.from_pretrained(output / "hf")
    initial = AutoModelForCausalLM.from_pretrained(output / "initial_model")
    assert AutoTokenizer.from_pretrained(output / "hf")("31>").input_ids
    assert not torch.equal(trained.lm_head.weight, initial.lm_head.weight)


def test_the_resolved_configuration_is_what_ran(short_run):
    import yaml

    output, _, _ = short_run
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert config["trainer"]["total_steps"] == 3
    assert config["algorithm"]["mini_batches"] == 2


@pytest.mark.slow
def test_two_runs_with_one_seed_are_the_same(short_run, tmp_path):
    _, _, first = short_run
    overrides = ("trainer.total_steps=2", "algorithm.kl_coefficient=0.01", "algorithm.mini_batches=2")
    # The learning-rate schedule spans the run: keep it as long as the first one's.
    _, second = train(tmp_path / "run", *overrides, "optimizer.schedule=constant")
    assert second[0]["reward/mean"] == first[0]["reward/mean"]
    assert second[0]["policy/entropy"] == pytest.approx(first[0]["policy/entropy"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_sort(tmp_path):
    _, metrics = train(tmp_path / "run")
    assert metrics[0]["reward/mean"] < 0.15
    assert_rewarded("grpo_sort", metrics)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2", "engine.sequence_format=bshd"],
    ids=["tp2", "pp2", "bshd"],
)
def test_it_learns_as_fast_in_other_layouts(layout, tmp_path):
    _, metrics = train(tmp_path / "run", layout, *STEEPEST)
    assert metrics[0]["reward/mean"] < 0.15
    assert metrics[-1]["reward/mean"] >= 0.45


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "a-replica-is-killed"])
def test_it_learns_one_step_ahead(killed, tmp_path):
    """The replica dies in the middle of the steepest part, and what it owed is not lost."""
    output = tmp_path / "run"
    overrides = [f"trainer.output_dir={output}", "rollout.replicas=2", "rollout.max_staleness=1"]
    path = output / "metrics.jsonl"
    command = [sys.executable, "-m", "anytron", "train", str(EXAMPLE), *overrides]
    with subprocess.Popen(command, env=users_environment()) as run:
        while killed and run.poll() is None:
            time.sleep(0.1)
            if path.exists() and len(path.read_text().splitlines()) >= 50:
                kill_writer_of(output / "logs" / "rollout-1-0.log")
                break
    assert run.returncode == 0

    metrics = records(path)
    assert [record["step"] for record in metrics] == list(range(1, 501))
    assert {record["rollout/age_max"] for record in metrics[1:]} <= {0.0, 1.0}
    assert metrics[-1]["reward/mean"] >= 0.90
    losses = output / "losses.jsonl"
    found = [record["then"] for record in records(losses)] if losses.exists() else []
    assert found == ["another process takes its place"] * killed
