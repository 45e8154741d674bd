"""``engine.on_policy=bitwise``: no step of a run has a token whose log-prob differs between rollout and training."""

from __future__ import annotations

import pytest

from tests.demo.test_grpo_mla import train
from tests.demo.test_grpo_sort import ROOT

BITWISE = ("engine.on_policy=bitwise", "data.prompts_per_step=4", "rollout.samples_per_prompt=4", "validation=null")
ONE = {"data_parallel_size": 1, "expert_model_parallel_size": 1}
LAYOUTS = {
    "TP2, EP2": ({"data_parallel_size": 1, "tensor_model_parallel_size": 2}, ()),
    "PP2, recomputed": ({**ONE, "pipeline_model_parallel_size": 2}, ("engine.recompute=full",)),
    "DP2, EP2, padded": ({}, ("engine.sequence_format=bshd",)),
}
"""Changes of the example's layout, two data-parallel ranks that share the experts, and other settings."""


def mismatches(metrics):
    """The steps in which something differs."""
    names = ("rollout/log_prob_abs_diff", "policy/rollout_mismatch")
    return [line["step"] for line in metrics if any(line[name] != 0.0 for name in names)]


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["megatron", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("example", ["grpo_sort", "grpo_moe", "grpo_mla"])
def test_two_hundred_steps(example, dtype, rollout, tmp_path):
    settings = (f"rollout.engine={rollout}", f"model.dtype={dtype}", "trainer.total_steps=200")

    metrics = train(ROOT / "examples" / f"{example}.yaml", tmp_path / "run", *BITWISE, *settings)

    assert (len(metrics), mismatches(metrics)) == (200, [])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_and_a_resumed_run(layout, tmp_path):
    (parallel, settings), run = LAYOUTS[layout], tmp_path / "run"
    sizes = [f"parallel.{name}={size}" for name, size in parallel.items()]
    settings = (*BITWISE, *sizes, *settings, "rollout.engine=megatron", "model.dtype=bfloat16")
    config = ROOT / "examples" / "grpo_moe.yaml"

    train(config, run, *settings, "trainer.total_steps=3")
    metrics = train(config, run, *settings, "trainer.total_steps=6", "resume=auto")

    assert ([line["step"] for line in metrics], mismatches(metrics)) == ([*range(1, 7)], [])
