"""The examples of algorithms other than GRPO and PPO, run as a user runs them."""

import json

import pytest

from tests.demo.expected import assert_rewarded
from tests.demo.test_grpo_sort import ROOT, anytron


def train(name, output, *overrides):
    finished = anytron("train", str(ROOT / "examples" / f"{name}.yaml"), f"trainer.output_dir={output}", *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["rloo_sort", "dapo_sort", "dr_grpo_sort", "gspo_sort", "cispo_sort"])
def test_it_learns_to_sort(name, tmp_path):
    metrics = train(name, tmp_path / "run")
    assert max(line["rollout/log_prob_abs_diff"] for line in metrics) < 1e-5
    assert metrics[0]["reward/mean"] < 0.15
    assert_rewarded(name, metrics)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_responses_are_weighed_alike_by_two_replicas_and_by_two_halves_of_a_context(tmp_path):
    """GSPO's ratios are of whole responses, which context parallelism cuts."""
    runs = {
        size: train("gspo_sort", tmp_path / str(number), "trainer.total_steps=3", *size)
        for number, size in enumerate([(), ("parallel.data_parallel_size=2",), ("parallel.context_parallel_size=2",)])
    }
    one, *others = runs.values()
    for other in others:
        for line, same in zip(one, other, strict=True):
            for name in ("grad_norm", "loss/policy", "policy/clip_fraction", "reward/mean"):
                assert same[name] == pytest.approx(line[name], rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_groups_are_drawn_and_kept_wherever_responses_are_made(tmp_path):
    """By one process, by two, by the training ranks, for two replicas of the model."""
    few = ("trainer.total_steps=3", "data.prompts_per_step=6", "rollout.samples_per_prompt=4")
    layouts = [(), ("rollout.replicas=2",), ("rollout.engine=megatron",), ("parallel.data_parallel_size=2",)]
    one, *others = [train("dapo_sort", tmp_path / str(number), *few, *layout) for number, layout in enumerate(layouts)]
    assert max(line["sampling/rounds"] for line in one) > 1
    assert all(line["sampling/groups_missing"] == 0 and line["reward/overlong_penalty"] < 0 for line in one)
    for other in others:
        for line, same in zip(one, other, strict=True):
            for name in (
                "sampling/groups_drawn",
                "sampling/rounds",
                "reward/mean",
                "reward/overlong_penalty",
                "grad_norm",
            ):
                assert same[name] == pytest.approx(line[name], rel=1e-3, abs=1e-5)
