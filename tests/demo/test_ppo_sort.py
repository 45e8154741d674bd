"""The example of PPO, run as a user runs it; its critic is gone on from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.demo.test_grpo_sort import users_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo_sort.yaml"


def train(output, *overrides):
    command = [sys.executable, "-m", "anytron", "train", str(EXAMPLE), f"trainer.output_dir={output}", *overrides]
    finished = subprocess.run(command, capture_output=True, text=True, env=users_environment(), check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Three steps on two pipeline stages, the first one the critic's alone, with a reference model."""
    output = tmp_path_factory.mktemp("short") / "run"
    metrics = train(
        output, "trainer.total_steps=3", "critic.warmup_steps=1", "data.prompts_per_step=64",
        "algorithm.kl_coefficient=0.01", "parallel.pipeline_model_parallel_size=2",
    )  # fmt: skip
    return output, metrics


def test_policy_and_critic_are_trained(short_run):
    _, (warm_up, *trained) = short_run

    assert warm_up["critic/grad_norm"] > 0
    assert "loss/policy" not in warm_up
    for line in trained:
        assert line["rollout/log_prob_abs_diff"] < 1e-5
        assert line["grad_norm"] > 0
        assert line["critic/loss"] > 0
        assert line["critic/value_mean"] != 0
    assert trained[-1]["loss/kl"] > 0


@pytest.mark.slow
def test_the_critic_is_a_model_and_a_head_and_another_run_starts_from_it(short_run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, _ = short_run
    assert AutoTokenizer.from_pretrained(output / "critic")("31>").input_ids
    AutoModelForCausalLM.from_pretrained(output / "critic")
    head = load_file(output / "critic" / "value_head.safetensors")["value_head.weight"]
    assert head.shape == (1, 64)
    assert head.any()

    steps = ("trainer.total_steps=2", "critic.warmup_steps=1", "data.prompts_per_step=64", "trainer.save_hf=false")
    first, _ = train(tmp_path / "run", *steps, f"critic.path={output / 'critic'}")
    # A new head explains nothing at the first step.
    assert first["critic/explained_variance"] != 0
    assert not (tmp_path / "run" / "critic").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", ["parallel.data_parallel_size=1", "parallel.tensor_model_parallel_size=2"])
def test_it_learns_to_sort(split, tmp_path):
    metrics = train(tmp_path / "run", split)

    assert metrics[0]["reward/mean"] < 0.15
    assert metrics[-1]["reward/mean"] >= 0.80
    assert metrics[-1]["critic/explained_variance"] > 0.2
