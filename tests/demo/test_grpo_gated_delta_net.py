"""The example with linear attention: on padded rows over two pipeline stages, and as it stands."""

import json

import pytest

from tests.demo.test_grpo_sort import ROOT, anytron

EXAMPLE = ROOT / "examples" / "grpo_gated_delta_net.yaml"


def train(output, *overrides):
    finished = anytron("train", str(EXAMPLE), f"trainer.output_dir={output}", *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_few_steps_over_two_stages_with_padded_rows(tmp_path):
    metrics = train(
        tmp_path / "run",
        "trainer.total_steps=3",
        "data.prompts_per_step=8",
        "parallel.pipeline_model_parallel_size=2",
        "engine.sequence_format=bshd",
        "engine.recompute=full",
    )
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["rollout/log_prob_abs_diff"] < 1e-5
        assert line["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_sort(tmp_path):
    metrics = train(tmp_path / "run")
    assert metrics[0]["reward/mean"] < 0.15
    assert metrics[-1]["reward/mean"] >= 0.6
