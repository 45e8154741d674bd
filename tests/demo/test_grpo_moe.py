"""The example of a mixture of experts: two ranks, half of the experts each, router replay, two updates a step."""

from __future__ import annotations

import json

import pytest

from tests.demo.test_grpo_sort import ROOT, anytron

EXAMPLE = ROOT / "examples" / "grpo_moe.yaml"
OWN = ('engine.options.router_replay="off"',)
FROM_ROLLOUT = ("rollout.replay_routing=true", *OWN)


def train(output, *overrides):
    finished = anytron("train", str(EXAMPLE), f"trainer.output_dir={output}", *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_few_steps_with_shared_out_experts_and_the_routing_of_the_rollout(tmp_path):
    metrics = train(tmp_path / "run", *FROM_ROLLOUT, "trainer.total_steps=3", "data.prompts_per_step=8")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["rollout/log_prob_abs_diff"] < 1e-5
        assert line["grad_norm"] > 0
        assert 0.9 < line["moe/load_balancing_loss"] < 3
        assert 0.0 < line["moe/rerouted_fraction"] < 0.3  # of the second update
    # The second update of a step sees weights that have moved.
    assert any(line["policy/ratio_mean"] != 1.0 for line in metrics)


@pytest.mark.slow
def test_in_bfloat16_the_routing_of_the_rollout_brings_the_engines_closer(tmp_path):
    """The figures of docs/how-to/train-mixture-of-experts.md, in fewer steps."""
    few = ("model.dtype=bfloat16", "algorithm.mini_batches=1", "trainer.total_steps=10")
    replayed = train(tmp_path / "replayed", *FROM_ROLLOUT, *few)
    own = train(tmp_path / "own", *OWN, *few)
    assert all(line["moe/rerouted_fraction"] > 0.0 for line in replayed)
    differences = [sum(line["rollout/log_prob_abs_diff"] for line in lines) for lines in (replayed, own)]
    assert differences[0] < differences[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_sort(tmp_path):
    metrics = train(tmp_path / "run")
    assert metrics[0]["reward/mean"] < 0.15
    assert metrics[-1]["reward/mean"] >= 0.7
