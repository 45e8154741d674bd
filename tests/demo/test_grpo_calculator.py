"""The example with a tool, run as a user runs it: the command line, real Megatron, real processes."""

import json
from pathlib import Path

import pytest

from tests import listening
from tests.demo.test_grpo_sort import anytron, watched

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_calculator.yaml"


def train(output, *overrides):
    finished = anytron("train", str(EXAMPLE), f"trainer.output_dir={output}", *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_same_task_as_a_program_with_openais_client(tmp_path):
    """That its steps equal those of the class is tested in tests/core/run/trainer/test_endpoint.py."""
    small = (
        "trainer.total_steps=2",
        "data.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "environment.processes=2",
    )
    example = EXAMPLE.with_name("grpo_calculator_agent.yaml")
    _, metrics, seen = watched(tmp_path / "run", *small, example=example)
    listening.check("one machine, an agent or `rollout.endpoint`", seen)
    for line in metrics:
        assert line["rollout/log_prob_abs_diff"] <= 1e-5
        assert line["environment/failed"] == line["endpoint/refused"] == 0
        assert line["endpoint/answered"] == 16 * line["environment/turns_mean"]


@pytest.mark.slow
def test_two_steps_on_two_ranks_with_a_reference_model(tmp_path):
    metrics = train(
        tmp_path / "run",
        "trainer.total_steps=2",
        "parallel.tensor_model_parallel_size=2",
        "algorithm.kl_coefficient=0.01",
        "algorithm.mini_batches=2",
        "data.prompts_per_step=8",
    )
    for line in metrics:
        assert line["rollout/log_prob_abs_diff"] <= 1e-5
        assert line["environment/failed"] == 0
        assert 1 < line["environment/turns_mean"] < 2
        assert line["environment/observation_tokens_mean"] > 0
        assert line["grad_norm"] > 0
    assert (tmp_path / "run" / "logs" / "environment-0.log").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_learns_to_use_the_calculator(tmp_path):
    metrics = train(tmp_path / "run")
    assert max(line["rollout/log_prob_abs_diff"] for line in metrics) <= 1e-5
    assert metrics[0]["environment/metrics/right"] < 0.01

    def at_the_end(name):
        return sum(line[name] for line in metrics[-10:]) / 10

    assert at_the_end("environment/metrics/right") >= 0.9
    assert at_the_end("environment/metrics/tool_calls") > 0.95
